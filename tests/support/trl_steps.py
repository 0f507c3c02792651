"""Three steps of a trainer of TRL, and the comparison of weights after them."""

import torch
from datasets import Dataset as Records
from float32 import EPSILON
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, RATE = 3, 1e-3
OPTIMIZER = {"lr": RATE, "schedule": "constant", "clip_grad": 1.0, "adam_eps": 1e-4}
OF_TRL = {
    "learning_rate": RATE, "lr_scheduler_type": "constant", "adam_epsilon": 1e-4, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "max_steps": STEPS, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    "dataloader_pin_memory": False, "train_sampling_strategy": "sequential", "max_length": 60,
}  # fmt: skip


def recorded(kind):
    """A trainer of TRL that keeps the loss of every step in full precision."""

    class Recording(kind):
        found = ()

        def compute_loss(self, *arguments, **named):
            loss = super().compute_loss(*arguments, **named)
            self.found = (*self.found, loss.item())
            return loss

    return Recording


def trained(kind, config, root, records, settings, reference=None):
    """Return losses, logged metrics and weights of three steps of a trainer of TRL."""
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    more = {} if reference is None else {"ref_model": AutoModelForCausalLM.from_pretrained(reference)}
    trainer = recorded(kind)(
        model=model, args=config(output_dir=str(root / "trl"), **{**OF_TRL, **settings}),
        train_dataset=Records.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(root / "model"), **more,
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return trainer.found, logs, {name: p.detach().clone() for name, p in model.state_dict().items()}


def check_weights(weights, expected, initial, name):
    """Compare weights to 1e-4, and what three steps have changed to 1e-3 beyond the rounding of the weights."""
    assert set(weights) == set(expected)
    of_weights, of_changes = [], []
    for key, theirs in expected.items():
        difference, size = float((weights[key].double() - theirs.double()).norm()), float(theirs.double().norm())
        of_weights.append(difference / size)
        of_changes.append(max(difference - EPSILON * size, 0) / float((theirs.double() - initial[key].double()).norm()))
    print(f"{name}: weights {max(of_weights):.1e}, of their change {max(of_changes):.1e}")
    assert max(of_weights) <= 1e-4, name
    assert max(of_changes) <= 1e-3, name
