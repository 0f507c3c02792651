"""The policy: a Megatron model that scores, trains, and keeps a reference and checkpoints."""
