"""Two real ranks train like one process, under every ZeRO stage and wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype

from emo.pipeline.batches.config import Batch
from emo.pipeline.config import load_config
from emo.pipeline.loss.objectives import get_objective
from emo.pipeline.planning.setup import setup_of
from tests.conftest import REPO
from tests.helpers import launching
from tests.helpers.loss_reference import relative_error
from tests.helpers.sharded_worker import CASES, PARAMETERS, PASSES, PROBED, STEPS, build_model, train_plain
from tests.helpers.wrapped import CASES as WRAPPERS
from tests.helpers.wrapped import alone

pytestmark = pytest.mark.slow
Results = dict[str, dict[Any, Any]]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of rank 0 of two ranks."""
    directory = tmp_path_factory.mktemp("sharded")
    done = launching.run_ranks("-m", "tests.helpers.sharded_worker", str(directory))
    assert done.returncode == 0, done.stdout[-5000:]
    return torch.load(directory / "results.pt")


def test_wrapped_models_train_as_one_process(sharded: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the global batch and every parameter after a step are the same."""
    monkeypatch.chdir(REPO)
    for case in WRAPPERS:
        bound = 2e-2 if case == "autocast" else 1e-5  # bfloat16 rounds halves of a batch differently
        for name, value in alone(case).items():
            assert relative_error(sharded["wrapped"][case][name], value) < bound, (case, name)


# Muon's iteration may run in half precision.
EXACT = 1e-5
MUON = EXACT if ns_compute_dtype() == torch.float32 else 5e-3


@pytest.mark.parametrize("name", CASES)
def test_every_stage_trains_as_one_process(sharded: Results, name: str) -> None:
    """Losses and updates of all parameters are the same, also in runs that resume.

    After a state is converted for another number of ranks, each group must count its steps separately.
    """
    case, result = CASES[name], sharded["stages"][name]
    expected = train_plain(case)
    bound = MUON if name.startswith("muon") else EXACT
    if name.endswith("bf16"):
        bound = 0.5 if name.startswith("narrow") else 0.25  # relative to the update of a few steps
    assert result["losses"] == pytest.approx(expected["losses"], rel=bound / 5)
    for key, parameter in build_model(case).named_parameters():
        updates = [tensors[key] - parameter.detach() for tensors in (result, expected)]
        assert relative_error(*updates) < bound, key
    if case.objective == "mle":
        # counts of the matrices of two layers, of embedding and head, and of the gains of five norms
        assert result["groups"] == ([14, 2, 5] if name.startswith("muon") else [16, 5])
    second_half = result["losses"][STEPS // 2 :].tolist()
    if "resumed" in result:
        assert result["resumed"].tolist() == second_half
    if "converted" in result:
        assert result["converted"].tolist() == pytest.approx(second_half, rel=1e-6)


def test_all_layers_share_one_compiled_graph(sharded: Results) -> None:
    """The layers share a graph although ZeRO-3 releases their weights between steps."""
    assert sharded["stages"]["compiled-3"]["graphs"] == 1


def test_the_probe_works_on_partitioned_weights(sharded: Results) -> None:
    assert sharded["probed"] == PROBED


def test_uninitialised_padding_is_not_damage(sharded: Results) -> None:
    """Models with NaN in the padding of their partitions load and save."""
    assert sharded["padding"] == {2: ""}


def test_zero2_communicates_as_the_plan_assumes(sharded: Results) -> None:
    """ZeRO-2 reduces the complete gradient in every pass, to all ranks or only to its owner."""
    sent = sharded["traffic"]
    assert sent["zero2"] == sent["zero2-float32"] == {"all_reduce": PASSES * PARAMETERS}
    assert sent["zero2-root"] == {"reduce": PASSES * PARAMETERS}
    assert sent["zero1"] == {"all_reduce": PARAMETERS}  # once a step
    config = load_config(REPO / "launch/recipes/paper/llama-7b-wikitext103.yaml", [])
    for flag in (True, False):
        ds_config = {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": flag}}
        setup = setup_of(config, Batch(16, 1, 1, 16), ds_config, get_objective("mle"))
        assert setup.all_reduced == flag
