"""Megatron's settings under their own names: found, parsed, recorded where given, refused."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from ledger.errors import InvalidArgument
from ledger.redact import redact
from trainer.megatron_args import check_on_device, megatron_fields, parse_annotation
from trainer.option_values import content_of, defaults, validate
from trainer.options import OPTIONS, add_options, passed_on_options
from trainer.settings import layout_record, parallel_settings


def parsed(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return vars(parser.parse_args(argv))


def test_every_field_of_the_configuration_classes_is_found() -> None:
    from trainer.megatron import DistributedDataParallelConfig, OptimizerConfig, TransformerConfig

    found = {field.name: field for field in megatron_fields()}
    kinds = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    assert {f.name for kind in kinds for f in fields(kind)} == found.keys()
    own = {option.name for option in OPTIONS}
    offered = {option.name for option in passed_on_options()}
    assert not own & offered
    for name, field in found.items():
        assert (field.refusal is None) == (name in offered or name in own) or name in own, name


@pytest.mark.parametrize(
    ("annotation", "kind", "choices"),
    [
        ("bool", "bool", None),
        ("Optional[int]", "int", None),
        ("float | None", "float", None),
        ("Optional[Literal['a', 'b']]", "str", ("a", "b")),
        ("Union[int, List[int]]", "int+", None),
        ("Optional[list[str]]", "strs", None),
        ("Tuple[float, float]", "floats", None),
        ("Union[str, list, Layout]", "str", None),
        ("Callable", None, None),
        ("torch.dtype", None, None),
        ("Optional[Callable[[int], bool]]", None, None),
    ],
)
def test_types_are_read_from_annotations(annotation: str, kind: str, choices: Any) -> None:
    assert parse_annotation(annotation) == (kind, choices)


def test_what_is_given_is_parsed_and_recorded() -> None:
    given = parsed(
        *("--lr", "1e-5", "--moe-z-loss-coeff", "0.5", "--no-bias-dropout-fusion"),
        *("--recompute-modules", "core_attn", "moe_act", "--moe-aux-loss-coeff", "0.25"),
    )
    passed = {
        "moe_z_loss_coeff": 0.5,
        "bias_dropout_fusion": False,
        "recompute_modules": ["core_attn", "moe_act"],
        "moe_aux_loss_coeff": 0.25,
    }
    assert given == {"lr": 1e-5, **passed}
    full = validate({**given, "global_batch_size": 64})
    assert content_of(full).items() >= passed.items()
    settings = parallel_settings(full)
    assert settings.megatron == passed
    assert layout_record(settings)["megatron"] == passed


def test_a_secret_in_an_address_is_recorded_nowhere() -> None:
    given = validate({"config_logger_dir": "s3://user:secret@host/logs"})
    settings = parallel_settings(given)
    assert settings.megatron == {"config_logger_dir": "s3://user:secret@host/logs"}
    assert "secret" not in str(layout_record(settings))


def test_what_is_not_given_is_not_recorded() -> None:
    assert parallel_settings(validate({})).megatron == {}
    assert "megatron" not in layout_record(parallel_settings(validate({})))
    assert content_of(validate({})).keys() <= defaults().keys()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--hidden-size", "64"], "config.json says it"),
        (["--fp16"], "--bf16"),
        (["--timers", "x"], "cannot say a Optional"),
        (["--hidden-dropout", "0.1"], "drops nothing"),
        (["--hidden-dropout", "none"], "drops nothing"),
        (["--optimizer", "sgd"], "is Adam's"),
    ],
)
def test_what_cannot_be_given_says_why(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(argv)
    assert reason in capsys.readouterr().err


def test_what_is_so_anyway_may_be_said() -> None:
    """As slime's scripts say it."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    said = ["--optimizer", "adam", "--hidden-dropout", "0.0", "--lr", "0.5"]
    said += ["--attention-dropout", "0"]
    assert vars(parser.parse_args(said)) == {"lr": 0.5}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"moe_permute_fusion": True}, "CUDA kernel"),
        ({"a_field_of_another_version": 1}, "a field of a configuration class"),
        ({"params_dtype": "float16"}, "--bf16"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        check_on_device(values, cuda=False)


def test_a_kernel_that_is_off_needs_no_gpu() -> None:
    check_on_device({"moe_permute_fusion": False}, cuda=False)


def test_a_setting_reaches_the_model(megatron: Any) -> None:
    from dataclasses import replace

    from tests.trainer.tiny_policy import config
    from trainer.model import build_model

    layout = replace(megatron, megatron={"attention_softmax_in_fp32": False})
    for settings, expected in ((layout, False), (megatron, True)):
        model = build_model(config(moe=False), settings, trainable=False)
        assert model.config.attention_softmax_in_fp32 is expected


def test_the_help_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, trainer.cli; trainer.cli.build_parser(show_megatron=True).format_help();"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers'}),"
        "'megatron.core' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["[]", "False"]


def test_no_option_is_taken_for_a_secret() -> None:
    """`run_started` goes through the redaction: what it took out could not be run again."""
    options = (*OPTIONS, *passed_on_options())
    values = {option.name: "a value" for option in options}
    assert redact(values) == values
