"""Tests of several models on one layout: no model changes the results of another."""

import pytest
import torch
from layout_cases import make_config, make_data
from small_models import and_long
from transformers import AutoModelForCausalLM

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.errors import WorkerError
from mcore_rl.losses.options import DPOOptions
from mcore_rl.testing.layout_check import ParallelLayout
from mcore_rl.testing.processes import run_processes


def beside(config, teacher_path):
    """Return a policy's metrics with and without a teacher of another family, and the teacher's scores."""
    from mcore_rl.algorithms.loss_functions import DPOLossFn
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy
    from mcore_rl.models.policy.scoring import ScoringModel

    def train(policy):
        data = make_data()
        data["reference_policy_logprobs"] = policy.get_logprobs(data)["logprobs"].roll(-1, dims=1) - 0.07
        return policy.train(data, DPOLossFn(DPOOptions(sft_loss_weight=0.3)))

    alone = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    expected = [train(alone), train(alone)]
    teacher = ScoringModel(config.model_copy(update={"model": ModelConfig(path=teacher_path)}))
    before = teacher.get_logprobs(make_data())["logprobs"]
    freed = teacher.offload()
    with pytest.raises(RuntimeError, match="weights or optimizer state are offloaded"):
        teacher.get_logprobs(make_data())
    policy = MegatronPolicy(config, total_steps=10, rows_per_unit=2)
    alone.shutdown()
    found = [train(policy), train(policy)]
    policy.offload_after_refit()
    teacher.prepare_for_lp_inference()
    after = teacher.get_logprobs(make_data())["logprobs"]
    policy.shutdown()
    teacher.shutdown()
    assert not torch.distributed.is_initialized()
    return expected, found, before, after, freed


LAYOUTS = and_long([ParallelLayout(tp=2, sp=True)], [ParallelLayout(pp=2), ParallelLayout(cp=2, dp=2)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_teacher_of_another_family_beside_the_policy(layout, model_of):
    config = layout.apply(make_config(model_of("llama")))
    expected, found, before, after, freed = run_processes(
        beside, config, model_of("deep"), world_size=layout.world_size
    )[0]
    assert found == expected  # bit for bit
    assert torch.equal(before, after)
    assert freed > 0
    model, data = AutoModelForCausalLM.from_pretrained(model_of("deep"), dtype=torch.float32), make_data()
    with torch.no_grad():
        for row, (ids, length) in enumerate(zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)):
            logprobs = model(ids[None, :length]).logits[0].log_softmax(-1)[:-1]
            plain = logprobs.gather(1, ids[1:length, None])[:, 0]
            torch.testing.assert_close(before[row, 1:length], plain, rtol=1e-5, atol=5e-5)


def two_layouts(config, other):
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    MegatronPolicy(config)
    MegatronPolicy(other)


def test_policies_of_two_layouts_are_refused(model_of):
    config = make_config(model_of("llama"))
    with pytest.raises(
        WorkerError, match="context_parallel_size=2: all trained models of a process must have the same layout"
    ):
        run_processes(two_layouts, config, ParallelLayout(cp=2).apply(config), world_size=2)


def test_model_of_an_ended_run_releases_nothing_of_the_next(monkeypatch):
    from mcore_rl.models.megatron import parallel_state

    layout = parallel_state._Layout(ParallelConfig(), "of the next run", {}, users=1)
    monkeypatch.setattr(parallel_state, "_layouts", [layout])
    parallel_state.destroy_parallel("of an ended run")
    assert parallel_state._layouts == [layout]
    assert layout.users == 1
