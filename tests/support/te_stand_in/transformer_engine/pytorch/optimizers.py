"""Adam as in `FusedAdam`, whose step is the group's and not the parameter's, and operations on lists of tensors."""

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
    ):
        options = {"amsgrad": amsgrad, "capturable": capturable, "master_weights": master_weights}
        options |= {"use_decoupled_grad": use_decoupled_grad, "store_param_remainders": store_param_remainders}
        options |= {"moments": (exp_avg_dtype, exp_avg_sq_dtype) != (torch.float32, torch.float32)}
        if any(options.values()) or not adam_w_mode:
            raise NotImplementedError(f"the stand-in's FusedAdam supports AdamW without {', '.join(options)}")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        loss = None if closure is None else closure()
        for group in (group for group in self.param_groups if group["params"]):
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[parameter], parameter.grad.float()
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                mean, square = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter.float()
                parameter.copy_(parameter.float() - lr * update)
        return loss

    def state_dict(self):
        for state in self.state.values():  # the real one, too, converts each state by its name and precision
            for name, values in state.items():
                assert {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}[name] == values.dtype
        return super().state_dict()


class FusedSGD(torch.optim.SGD):
    def __init__(
        self,
        params,
        lr,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        *,
        wd_after_momentum=False,
        materialize_master_grads=True,
        set_grad_none=None,
    ):
        raise NotImplementedError("the stand-in has no FusedSGD")


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    return op(2**16, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    norms = torch.stack([x.float().norm() for x in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)
