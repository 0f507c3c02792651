"""Models: Megatron's, the policy that trains one, engines that generate, and the transfer of weights to them."""
