"""Several adapters in one batch, over tensor- and pipeline-parallel ranks, against each merged model alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.convert.huggingface.export import export
from megalite.convert.huggingface.quantise import quantise_folder
from megalite.generation import slots
from megalite.generation.batch_engine import BatchEngine, Event
from megalite.generation.loaded import LoadedModel, load_source
from megalite.generation.request import GREEDY, Request, Sampling
from megalite.generation.source import find_source
from megalite.model.adapters import AdaptedLinear
from megalite.parallel.device import local_device
from megalite.parallel.int8 import Int8Linear
from megalite.parallel.lora_bank import Selection
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora
from megalite.topology.axes import Layout
from tests.support.adapters import adapter_run, peft_folder
from tests.support.generation import mixed_requests
from tests.support.parity import FLOAT32_RTOL, LAYOUT_RTOL, assert_close
from tests.support.selection import cases
from tests.support.tiny import FAMILY_SHAPES, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

VOCABULARY, BEST = 384, 3
LORAS = {
    "a": Lora(3, 6.0, ("q_proj", "v_proj", "down_proj")),
    "run": Lora(5, 4.0, ("o_proj", "gate_proj", "k_proj"), rslora=True),
    "c": Lora(2, 8.0, ("model.layers.1.mlp.up_proj", "model.layers.3.self_attn.q_proj")),
}
NAMES = (None, *LORAS)
KINDS = {"greedy": GREEDY, "sampled": Sampling(1.3, top_k=50, repetition_penalty=1.2)}


@dataclass(frozen=True)
class World:
    """A folder with `base`, its adapters by name, `tokenizer.json`, and the results of the merged models alone."""

    folder: Path
    alone: Mapping[str, list[Any]]


def opened(folder: Path, mesh: ParallelMesh, base: str = "base") -> LoadedModel:
    """Load the base with all adapters, in float64."""
    adapters = {name: folder / name for name in LORAS}
    source = find_source(folder / base, tokenizer=folder / "tokenizer.json", adapters=adapters)
    return load_source(source, mesh, torch.float64)


def requests(sampling: Sampling = GREEDY) -> list[Request]:
    """Return requests with all adapters and without; each beginning occurs with several adapters."""
    same = mixed_requests(20, VOCABULARY, seed=9)[-1]
    assert len(same.prompt_ids) > slots._SHORTEST_REUSE
    given = [*mixed_requests(7, VOCABULARY, seed=2), *[same] * 9]
    return [
        replace(
            each, adapter=NAMES[3 * at % 4], logprobs=BEST, sampling=replace(sampling, seed=at), max_tokens=9
        )
        for at, each in enumerate(given)
    ]


def ran(loaded: LoadedModel, given: list[Request], at_once: int = 5) -> list[list[Event]]:
    """Return the events of each request."""
    engine = BatchEngine(loaded, max_requests=at_once, prefill_chunk=11)
    found: dict[int, list[Event]] = {engine.submit(each): [] for each in given}
    while engine.has_work:
        for event in engine.step():
            found[event.number].append(event)
    return list(found.values())


def numbers(events: list[list[Event]]) -> list[Any]:
    """Return the tokens and the best tokens of each request, and their log-probabilities in one tensor."""
    tokens = [[each.token, *(token for token, _ in each.top_logprobs)] for row in events for each in row]
    logs = [[each.logprob, *(log for _, log in each.top_logprobs)] for row in events for each in row]
    return [tokens, torch.tensor(logs, dtype=torch.float64)]


def assert_same(found: list[Any], expected: list[Any], *, rtol: float = LAYOUT_RTOL) -> None:
    assert found[0] == expected[0]
    assert_close(found[1], expected[1], rtol=rtol)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("adapters")
    shape = replace(FAMILY_SHAPES["llama with biases"], vocab_size=VOCABULARY)
    export(save_stage(folder / "trained", shape, lively_stage(shape, scale=8.0)), folder / "base", None)
    tiny_tokenizer(folder)
    for seed, (name, lora) in enumerate(LORAS.items()):
        (adapter_run if name == "run" else peft_folder)(folder / name, folder / "base", lora, seed=seed)
    sources = {
        name: find_source(folder / (name or "base"), tokenizer=folder / "tokenizer.json") for name in NAMES
    }
    merged = {name: load_source(each, ParallelMesh.single(), torch.float64) for name, each in sources.items()}
    alone = {
        kind: numbers(
            [ran(merged[each.adapter], [replace(each, adapter=None)])[0] for each in requests(sampling)]
        )
        for kind, sampling in KINDS.items()
    }
    # The adapters change what comes next, each in its own way.
    tokens = {
        name: ran(model, [replace(requests()[-1], adapter=None)])[0][0].token
        for name, model in merged.items()
    }
    assert len(set(tokens.values())) == len(NAMES)
    return World(folder, alone)


def test_a_batch_has_the_tokens_and_logits_of_each_merged_model_alone(world: World) -> None:
    loaded = opened(world.folder, ParallelMesh.single())
    assert_same(numbers(ran(loaded, requests())), world.alone["greedy"])
    assert_same(numbers(ran(loaded, requests(KINDS["sampled"]))), world.alone["sampled"])
    one_by_one = [ran(loaded, [each], 1)[0] for each in requests(KINDS["sampled"])]
    assert_same(numbers(one_by_one), world.alone["sampled"])


def on_rank(folder: Path, layout: Layout) -> dict[str, list[Any]]:
    device = local_device(torch.distributed.get_rank(), layout.world_size)
    loaded = opened(folder, ParallelMesh.over_world(layout, device))
    return {kind: numbers(ran(loaded, requests(sampling))) for kind, sampling in KINDS.items()}


LAYOUTS = [Layout(pipeline=2, tensor=2), Layout(tensor=2), Layout(pipeline=2)]


@pytest.mark.parametrize("layout", cases(LAYOUTS, core=LAYOUTS[:1]), ids=str)
def test_ranks_have_the_tokens_and_logits_of_one_process(ranks, world: World, layout: Layout) -> None:
    for found in ranks.run(on_rank, layout.world_size, folder=world.folder, layout=layout):
        for kind, expected in world.alone.items():
            assert_same(found[kind], expected)


@pytest.mark.extended
def test_an_accelerator_has_the_tokens_and_logits_of_the_cpu(devices, world: World) -> None:
    layout = Layout(tensor=2)
    for found in devices.run(on_rank, layout.world_size, folder=world.folder, layout=layout):
        for kind, expected in world.alone.items():
            assert_same(found[kind], expected)


@pytest.mark.extended
def test_logits_are_those_of_peft(world: World) -> None:
    from peft import PeftModel  # not in each rank of the other tests
    from transformers import AutoModelForCausalLM

    request = next(each for each in requests() if each.adapter == "a")
    [events] = ran(opened(world.folder, ParallelMesh.single()), [request])
    base = AutoModelForCausalLM.from_pretrained(world.folder / "base", dtype=torch.float64)
    # PEFT gives an adapter's values the type of its module.
    theirs = PeftModel.from_pretrained(base, world.folder / "a", autocast_adapter_dtype=False)
    ids = [*request.prompt_ids, *(each.token for each in events)]
    with torch.no_grad():
        logs = theirs(input_ids=torch.tensor([ids[:-1]])).logits[0, -len(events) :].log_softmax(-1)
    assert_same(
        numbers([events]),
        [
            [[int(row.argmax()), *row.topk(BEST).indices.tolist()] for row in logs],
            torch.stack([torch.cat((row.max()[None], row.topk(BEST).values)) for row in logs]),
        ],
        rtol=FLOAT32_RTOL,  # of transformers' norms
    )


@pytest.mark.extended
def test_int8_linears_take_adapters(world: World, tmp_path: Path) -> None:
    for name in ("tokenizer.json", *LORAS):
        (tmp_path / name).symlink_to(world.folder / name)
    (tmp_path / "int8").mkdir()
    quantise_folder(world.folder / "base", tmp_path / "int8")
    rounded, exact = (
        opened(folder, ParallelMesh.single(), base)
        for folder, base in ((tmp_path, "int8"), (world.folder, "base"))
    )
    with torch.no_grad():
        for one, other in zip(rounded.model.modules(), exact.model.modules(), strict=True):
            if isinstance(one, Int8Linear):
                other.weight.copy_(one.weight.to(torch.float64) * one.scale)
    assert_same(numbers(ran(rounded, requests())), numbers(ran(exact, requests())))


def _keys_of_any_adapter(search: Callable[..., Any]) -> Callable[..., Any]:
    def searched(self: Any, request: Request) -> Any:
        held, self._adapters = self._adapters, [request.adapter] * len(self._adapters)
        try:
            return search(self, request)
        finally:
            self._adapters = held

    return searched


def _of_the_first_token(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, tokens, device: init(self, [tokens[0]] * len(tokens), device)


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "keys of another adapter reused": (slots.SlotTable, "_longest_beginning", _keys_of_any_adapter),
    "adapters of all tokens added": (Selection, "mask", lambda mask: lambda *_: None),
    "the adapter of the first token for all": (Selection, "__init__", _of_the_first_token),
    "a scale forgotten": (
        AdaptedLinear,
        "fill",
        lambda fill: lambda self, a, b: fill(replace(self, scale=1.0), a, b),
    ),
}


@pytest.mark.parametrize("fault", cases(FAULTS, core=["keys of another adapter reused"]))
def test_a_planted_fault_changes_tokens(world: World, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    target, attribute, replaced = FAULTS[fault]
    monkeypatch.setattr(target, attribute, replaced(getattr(target, attribute)))
    found = numbers(ran(opened(world.folder, ParallelMesh.single()), requests()))
    assert found[0] != world.alone["greedy"][0]
