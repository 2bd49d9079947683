"""Pickles of other projects: what their classes leave behind, and that nothing of them ever runs."""

import collections
import enum
import os
import pickle
import random
import sys
import types
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from signal import SIGTERM, Signals
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.convert.foreign.unpickle import Foreign, load_pickle, require_undamaged
from megalite.errors import CheckpointError


@contextmanager
def class_of(full_name: str, made: Any = None) -> Iterator[Any]:
    """A class that pickles under a name of a project that is not installed; gone afterwards."""
    module, name = full_name.rsplit(".", 1)
    made = made or type(name, (), {})
    made.__module__, made.__qualname__ = module, name
    names = [module[:end] for end, letter in enumerate(f"{module}.") if letter == "."]
    before = {each: sys.modules.get(each) for each in names}
    sys.modules.update({each: types.ModuleType(each) for each in names})
    setattr(sys.modules[module], name, made)
    try:
        yield made
    finally:
        for each, old in before.items():
            if old is None:
                del sys.modules[each]
            else:
                sys.modules[each] = old


class Backend(enum.Enum):
    one, two = 1, 2


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_tensors_and_plain_values_come_back(tmp_path: Path, zipped: bool) -> None:
    shared = torch.arange(6.0)
    content: dict[str, Any] = {
        "weights": {
            "a": shared[:4],
            "b": shared.view(2, 3).t(),
            "c": torch.tensor([1.5], dtype=torch.bfloat16),
        },
        "list": [1, 2**70, None, True, "text", 1.5, (b"bytes", {3})],
        "ordered": collections.OrderedDict(size=torch.Size([2, 3]), dtype=torch.float16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    found = load_pickle(tmp_path / "file.pt")
    for name, tensor in content["weights"].items():
        assert torch.equal(found["weights"][name], tensor) and found["weights"][name].dtype is tensor.dtype
    assert {key: found[key] for key in ("list", "ordered")} == {
        key: content[key] for key in ("list", "ordered")
    }
    assert torch.equal(found["parameter"], torch.ones(2))


def test_arguments_are_a_table_and_their_objects_stand_ins(tmp_path: Path) -> None:
    with class_of("megatron.core.transformer.enums.AttnBackend", Backend) as backend:
        arguments = Namespace(num_layers=2, backend=backend.two, exit_signal=SIGTERM, load=PosixPath("/x/y"))
        torch.save({"args": arguments}, tmp_path / "file.pt")
    found = load_pickle(tmp_path / "file.pt")["args"]
    assert found.type_name == "argparse.Namespace" and found.fields["num_layers"] == 2
    assert isinstance(found.fields["backend"], Foreign) and found.fields["backend"].arguments == (2,)
    assert repr(found.fields["backend"]) == "megatron.core.transformer.enums.AttnBackend(2)"
    assert "".join(found.fields["load"].arguments).replace("/", "") == "xy"
    assert not isinstance(found.fields["exit_signal"], Signals)


def test_attributes_in_slots_are_fields(tmp_path: Path) -> None:
    with class_of("deepspeed.utils.tensor_fragment.fragment_address") as plain:
        address = plain()
        address.__dict__.update(numel=3, start=4)
        torch.save(address, tmp_path / "file.pt")
    assert load_pickle(tmp_path / "file.pt").fields == {"numel": 3, "start": 4}
    stand_in = Foreign("argument")
    stand_in.__setstate__((None, {"slot": 5}))
    stand_in.__setstate__(({"own": 6}, {"slot": 7}))
    assert stand_in.fields == {"slot": 7, "own": 6} and stand_in.state is None


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "megatron.fp16.loss_scaler.DynamicLossScaler",
        "fp16.loss_scaler.LossScaler",
    ],
)
def test_a_loss_scaler_is_its_fields(tmp_path: Path, name: str) -> None:
    with class_of(name) as scaler:
        made = scaler()
        made.__dict__.update(cur_scale=1024.0, cur_iter=3)
        torch.save({"loss_scaler": made}, tmp_path / "file.pt")
    found = load_pickle(tmp_path / "file.pt")["loss_scaler"]
    assert found.type_name == name and found.fields == {"cur_scale": 1024.0, "cur_iter": 3}


@pytest.mark.parametrize(
    "scalar",
    [np.float64(1.5), np.float32(0.1), np.float16(2), np.int64(-(2**40)), np.uint8(7), np.bool_(True)],
    ids=lambda scalar: type(scalar).__name__,
)
def test_scalars_of_numpy_are_plain_numbers(tmp_path: Path, scalar: Any) -> None:
    torch.save({"x": scalar}, tmp_path / "file.pt")
    found = load_pickle(tmp_path / "file.pt")["x"]
    assert type(found) is type(scalar.item()) and found == scalar.item()


def test_random_states_and_defaultdicts_pass(tmp_path: Path) -> None:
    counts: dict[str, int] = collections.defaultdict(int, a=1)
    states: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    torch.save({"rng_state": [states], "counts": counts}, tmp_path / "file.pt")
    found = load_pickle(tmp_path / "file.pt")
    assert found["counts"] == {"a": 1}
    assert found["rng_state"][0]["numpy"][1].type_name.endswith("_reconstruct")
    assert torch.equal(found["rng_state"][0]["torch"], states["torch"])


class Runs:
    """Calls a function of its choice where it is unpickled without care."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize(
    ("function", "asks_for"),
    [(os.system, "posix.system"), (eval, "eval"), (os.mkdir, "posix.mkdir"), (getattr, "getattr")],
    ids=["os.system", "eval", "os.mkdir", "getattr"],
)
def test_nothing_of_a_malicious_file_runs(tmp_path: Path, function: Any, asks_for: str, zipped: bool) -> None:
    trace = tmp_path / "trace"
    text = {os.system: f"touch {trace}", eval: f"open({str(trace)!r}, 'w')"}.get(function, str(trace))
    arguments = (str, "upper") if function is getattr else (text,)
    file = tmp_path / "file.pt"
    torch.save({"args": Runs(function, *arguments)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=f"file.pt asks for {asks_for}, .*no code was run"):
        load_pickle(file)
    assert not trace.exists()
    if function is os.system:
        torch.load(file, weights_only=False)
        assert trace.exists(), "the file does not do what it is to do"


def test_what_a_library_allowed_at_its_import_is_not_allowed_here(tmp_path: Path) -> None:
    torch.save(Runs(os.path.join, "a", "b"), tmp_path / "file.pt")
    with torch.serialization.safe_globals([os.path.join]):
        assert torch.load(tmp_path / "file.pt") == "a/b"
        with pytest.raises(CheckpointError, match=r"asks for posixpath\.join"):
            load_pickle(tmp_path / "file.pt")
        assert torch.load(tmp_path / "file.pt") == "a/b"


def test_a_file_that_is_no_pickle(tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"file.pt is not a complete file of torch\.save"):
        load_pickle(tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"no\.pt cannot be read: .*No such file"):
        load_pickle(tmp_path / "no.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pickle(tmp_path)


@settings(max_examples=40)
@given(st.data())
def test_a_truncated_or_changed_file_is_refused_or_loads(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("pickle") / "file.pt"
    torch.save({"w": torch.arange(40.0), "more": torch.ones(3000), "args": Namespace(a=1)}, path)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match=r"file\.pt is not a complete file"):
        load_pickle(path)
    changed = bytearray(content)
    changed[cut] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        load_pickle(path)
    except CheckpointError as error:
        assert "file.pt" in str(error)


def test_a_changed_number_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    require_undamaged(path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.tensor(500.0).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert not torch.equal(load_pickle(path)["w"], torch.arange(1000.0))
    with pytest.raises(CheckpointError, match=r"file\.pt is damaged: .*data/0 does not match its checksum"):
        require_undamaged(path)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(1).expand(1 << 60), r"x has 4,611,686,018,427,387,904 bytes, but the file \d"),
        (torch.zeros(1 << 9, 1).expand(-1, 1 << 9), "x has 1,048,576 bytes, but the file"),
        (torch.eye(2).to_sparse(), "x is not a dense tensor"),
        (torch.ones(2, device="meta"), "x is not a dense tensor"),
    ],
)
@pytest.mark.parametrize("wrapped", [lambda inner: inner, lambda inner: Namespace(a=([inner], {}))])
def test_a_tensor_that_its_file_does_not_store_is_named(
    tmp_path: Path, tensor: torch.Tensor, said: str, wrapped: Any
) -> None:
    inner: dict[str, Any] = {"x": tensor}
    inner["itself"] = inner
    torch.save(wrapped(inner), tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=said):
        load_pickle(tmp_path / "file.pt")


def test_a_compressed_file_is_not_taken_for_an_undamaged_one(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(99)}, tmp_path / "file.pt")
    with (
        zipfile.ZipFile(tmp_path / "file.pt") as before,
        zipfile.ZipFile(tmp_path / "zipped.pt", "w", zipfile.ZIP_DEFLATED) as after,
    ):
        for record in before.namelist():
            after.writestr(record, before.read(record))
    with pytest.raises(CheckpointError, match="is compressed, which torch does not do"):
        require_undamaged(tmp_path / "zipped.pt")


def test_nobody_is_told_to_load_without_the_guard(tmp_path: Path) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with (tmp_path / "file.pt").open("wb") as file:
            pickle.dump(Runs(os.system, "true"), file, protocol=protocol)
        with pytest.raises(CheckpointError) as caught:
            load_pickle(tmp_path / "file.pt")
        assert "weights_only" not in str(caught.value) and "file.pt" in str(caught.value)


def test_a_pickle_alone_is_read_without_a_zip_around_it(tmp_path: Path) -> None:
    with (tmp_path / "file.pt").open("wb") as file:
        pickle.dump(Runs(os.system, "true"), file, protocol=2)
    with pytest.raises(CheckpointError, match=r"asks for posix\.system"):
        load_pickle(tmp_path / "file.pt")
