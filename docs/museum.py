"""The museum of bugs: the page of the reports of others that tests show not to happen here.

python -m docs.museum        # writes docs/museum.md
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "museum.md"
REPOSITORIES = {
    "accelerate": "huggingface/accelerate",
    "apex": "NVIDIA/apex",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "axolotl": "axolotl-ai-cloud/axolotl",
    "Chinese-LLaMA-Alpaca": "ymcui/Chinese-LLaMA-Alpaca",
    "ColossalAI": "hpcaitech/ColossalAI",
    "cookbook": "fw-ai/cookbook",
    "datasets": "huggingface/datasets",
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "Energon": "NVIDIA/Megatron-Energon",
    "Eval": "ai-twinkle/Eval",
    "gpt-neox": "EleutherAI/gpt-neox",
    "imp": "kekzl/imp",
    "lingua": "facebookresearch/lingua",
    "LlamaFactory": "hiyouga/LlamaFactory",
    "lm-evaluation-harness": "EleutherAI/lm-evaluation-harness",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Megatron-DeepSpeed": "deepspeedai/Megatron-DeepSpeed",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "mlx-lm": "ml-explore/mlx-lm",
    "ms-swift": "modelscope/ms-swift",
    "nanotron": "huggingface/nanotron",
    "nccl": "NVIDIA/nccl",
    "OLMo-core": "allenai/OLMo-core",
    "open-instruct": "allenai/open-instruct",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "peft": "huggingface/peft",
    "tinker-cookbook": "thinking-machines-lab/tinker-cookbook",
    "torchtitan": "pytorch/torchtitan",
    "TransformerEngine": "ROCm/TransformerEngine",
    "transformers": "huggingface/transformers",
    "trl": "huggingface/trl",
    "unsloth": "unslothai/unsloth",
    "vllm": "vllm-project/vllm",
    "vllm-fork": "HabanaAI/vllm-fork",
}
"""Name in a report -> owner and repository on GitHub."""
SUBJECTS = {
    "conversations": "Conversations and chat templates",
    "preferences": "Preferences",
    "tokenizers": "Tokenizers and vocabularies",
    "data": "Text, batches and validation",
    "adapters": "Adapters",
    "gradients": "Gradients and ZeRO",
    "layouts": "Layouts, documents and dropout",
    "optimizer": "Optimizers and learning rates",
    "checkpoints": "Checkpoints and resumed runs",
    "folders": "Hugging Face folders",
    "evaluation": "Evaluation",
    "serving": "Serving and generation",
    "launch": "Launchers and hosts",
    "records": "Metrics and reports",
    "settings": "Settings, plans and builds",
}
"""Subject of an exhibit -> its heading."""
PREAMBLE = """# The museum of bugs

Written by `python -m docs.museum` from the decorators of the tests; a test keeps it so.

{number} failures that users of other programs have reported in public, and that a runtime like megalite could share.
Each is an exhibit: a test that does what the report did and shows what happens here. It runs a second time with the
fault planted in megalite's code, and has to fail then. The reports are linked for their facts; the words are ours.
Most of them are long mended there.

```bash
python -m pytest -m exhibit
```

{subjects}
"""


@dataclass(frozen=True)
class Row:
    """An exhibit as its decorator says it. test: file::name, with the case in brackets if it names one."""

    report: str
    also: tuple[str, ...]
    subject: str
    there: str
    here: str
    test: str


def report_links(*reports: str) -> str:
    """Return the links of reports, each as "DeepSpeed#8224" or "DeepSpeed PR#8245", in Markdown.

    Raises ValueError if a report has another form or names a repository that is not in REPOSITORIES.
    """
    links = []
    for report in reports:
        parts = re.fullmatch(r"([\w-]+)( PR)?#(\d+)", report)
        if parts is None or parts[1] not in REPOSITORIES:
            raise ValueError(
                f"{report}: not NAME#NUMBER or NAME PR#NUMBER with a NAME of {list(REPOSITORIES)}"
            )
        kind = "pull" if parts[2] else "issues"
        links.append(f"[{report}](https://github.com/{REPOSITORIES[parts[1]]}/{kind}/{parts[3]})")
    return ", ".join(links)


def exhibits() -> list[Row]:
    """Return the exhibits in the order of their reports, read from the source of the tests."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return sorted((row for file in files for row in _of_file(file)), key=_order)


def _of_file(file: Path) -> Iterator[Row]:
    text = file.read_text(encoding="utf-8")
    if "@exhibit(" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "exhibit":
                said: dict[str, Any] = {
                    keyword.arg: ast.literal_eval(keyword.value)
                    for keyword in call.keywords
                    if keyword.arg and keyword.arg not in ("fault", "costly")
                }
                case = f"[{case}]" if (case := said.pop("case", "")) else ""
                test = f"{file.relative_to(ROOT).as_posix()}::{node.name}{case}"
                yield Row(report=ast.literal_eval(call.args[0]), test=test, **{"also": (), **said})


def _order(row: Row) -> tuple[int, str, int]:
    name, _, number = row.report.partition("#")
    return list(SUBJECTS).index(row.subject), name.removesuffix(" PR").lower(), int(number)


def page() -> str:
    """Return the page, in Markdown."""
    rows = exhibits()
    shown = {key: title for key, title in SUBJECTS.items() if any(row.subject == key for row in rows)}
    counts = [f"- [{title}](#{_anchor(title)})" for title in shown.values()]
    lines = [PREAMBLE.format(number=len(rows), subjects="\n".join(counts))]
    for key, title in shown.items():
        lines += [f"## {title}", "", "| report | there | here | test |", "|---|---|---|---|"]
        lines += [_line(row) for row in rows if row.subject == key]
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _line(row: Row) -> str:
    file, _, name = row.test.partition("::")
    cells = (
        report_links(row.report, *row.also),
        row.there,
        row.here,
        f"[`{name}`](../{file})",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
