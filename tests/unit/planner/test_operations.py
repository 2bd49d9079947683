"""Parameters and operations by the figures that others have published."""

from dataclasses import replace

import pytest

from megalite.config.sections.schema import ModelConfig
from megalite.config.sources.presets import PRESETS
from megalite.planner.parameter_count import ParameterCount
from megalite.topology.adapter import Lora
from megalite.topology.parameters import model_parameters
from megalite.topology.shape import ModelShape
from tests.support.parity import UTILISATION_RTOL, about
from tests.support.published_operations import published_batch_operations, token_operations
from tests.support.selection import cases

ROWS, LENGTH = 51200, 2048
# Narayanan et al. 2021, table 1: billions of parameters -> heads, hidden size, layers.
MEGATRON = {
    1.7: (24, 2304, 24),
    3.6: (32, 3072, 30),
    7.5: (32, 4096, 36),
    18.4: (48, 6144, 40),
    39.1: (64, 8192, 48),
    76.1: (80, 10240, 60),
    145.6: (96, 12288, 80),
    310.1: (128, 16384, 96),
    529.6: (128, 20480, 105),
    1008.0: (160, 25600, 128),
}
# Korthikanti et al. 2022, tables 3 and 5: heads, hidden, layers, cards, sequences; seconds with selective recompute,
# share of the cards' peak in model operations and in those of the hardware.
UTILISATION = {
    "22B": ((64, 6144, 48), 8, 4, 1.10, 41.5, 43.7),
    "175B": ((96, 12288, 96), 64, 64, 13.75, 51.4, 52.8),
    "530B": ((128, 20480, 105), 280, 280, 37.83, 56.0, 57.0),
    "1T": ((160, 25600, 128), 512, 512, 71.49, 56.3, 57.0),
}
A100 = 312e12


def gpt(heads: int, hidden: int, layers: int) -> ModelShape:
    """Return GPT as Megatron-LM has it: biases everywhere, learned positions, a tied head."""
    return ModelShape(
        vocab_size=ROWS,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        position_embedding="learned",
        norm="layer_norm",
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        hidden_act="gelu",
    )


@pytest.mark.parametrize("billions", MEGATRON)
def test_parameters_are_those_of_the_published_table(billions: float) -> None:
    assert round(ParameterCount.of(gpt(*MEGATRON[billions])).total / 1e9, 1) == billions


@pytest.mark.parametrize("billions", MEGATRON)
def test_operations_are_those_of_the_published_formula(billions: float) -> None:
    """The formula leaves out what is no matrix product, as we do: equal to the last digit."""
    shape = gpt(*MEGATRON[billions])
    for recompute in ("none", "full"):
        ours = token_operations(shape, LENGTH, recompute).hardware * LENGTH
        assert ours == about(published_batch_operations(shape, LENGTH, 1, recompute))


@pytest.mark.parametrize("name", cases(UTILISATION, core=["22B"]))
def test_published_utilisation(name: str) -> None:
    sizes, cards, sequences, seconds, model, hardware = UTILISATION[name]
    shape, peak = gpt(*sizes), seconds * cards * A100
    of_model = token_operations(shape, LENGTH).full_attention * LENGTH * sequences
    assert 100 * of_model / peak == about(model, rtol=UTILISATION_RTOL)
    of_hardware = published_batch_operations(shape, LENGTH, sequences, "selective")
    assert 100 * of_hardware / peak == about(hardware, rtol=UTILISATION_RTOL)
    ours = token_operations(shape, LENGTH, "selective").hardware * LENGTH * sequences
    assert of_model < ours < of_hardware


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_counted(name: str) -> None:
    shape = ModelConfig(**PRESETS[name]).shape(16384)
    count = ParameterCount.of(shape)
    by_counts = sum(each.numel for each in model_parameters(shape) if each.by_counts)
    assert count.trained + by_counts == count.total > shape.vocab_size * shape.hidden_size


def test_an_adapter_trains_a_few() -> None:
    shape = replace(gpt(8, 64, 2), adapter=Lora(2, 4, ("q_proj",)))
    assert ParameterCount.of(shape).trained == 2 * 2 * (64 + 64)
