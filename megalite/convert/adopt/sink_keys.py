"""The keys by which another program reports to TensorBoard, Weights & Biases or MLflow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.convert.adopt.rules import OFF, ON, KeyRule, Reading, text

_UNSET = (None, "", *OFF)


@dataclass(frozen=True)
class SinkKey:
    """A key that turns a sink on, or names the run there.

    sinks: every such key of the program -> the sink that it turns on. setting: what the value becomes; "": nothing.
    """

    sinks: Mapping[str, str]
    setting: str

    def answer(self, reading: Reading, key: str, value: Any) -> None:
        if value in _UNSET:
            reading.no_effect(key, "it is off")
            return
        settings: dict[str, Any] = {self.setting: text(value)} if self.setting else {}
        # A switch that is off wins over a name.
        off = {sink for name, sink in self.sinks.items() if reading.get(name) in OFF}
        on = [
            sink for name, sink in self.sinks.items() if reading.get(name) not in _UNSET and sink not in off
        ]
        if key in self.sinks and on:
            settings["monitor.report_to"] = list(dict.fromkeys(on))
        if self.setting or value in ON:
            reading.take(key, settings)
        else:
            reading.change(key, settings, "written to run.folder/tensorboard")


def sink_keys(sinks: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, KeyRule]:
    """Return key -> rule. sinks: key -> the sink that it turns on. settings: key -> the setting that names the run."""
    return {key: SinkKey(sinks, settings.get(key, "")) for key in {**sinks, **settings}}
