"""The load, power and temperature of a rank's accelerator, read by a thread beside the training."""

import threading
from typing import NamedTuple

import torch

# The driver's own samples are as old as this.
SECONDS = 1.0


class CardReading(NamedTuple):
    """utilisation: share of the time in which a kernel ran."""

    utilisation: float
    watts: float
    celsius: float


class CardSensors:
    """Reads the sensors of a device once a second: a question to the driver takes milliseconds."""

    def __init__(self, device: torch.device):
        """missing: why there are no readings; "" if there are, or if the device has no sensors that torch knows."""
        self._device, self._module = device, torch.get_device_module(device)
        self.last: CardReading | None = None
        self.missing = ""
        if not hasattr(self._module, "power_draw"):
            return
        try:
            self.last = self._read()
        # The driver's library raises errors of its own, and ModuleNotFoundError where it is absent.
        except Exception as error:
            absent = isinstance(error, ModuleNotFoundError)
            remedy = "; pip install 'megalite[cards]'" if absent else ""
            self.missing = f"load, power and temperature of the cards are not recorded: {error}{remedy}"
            return
        threading.Thread(target=self._watch, name="card sensors", daemon=True).start()

    def _read(self) -> CardReading:
        module, device = self._module, self._device
        percent, milliwatts = module.utilization(device), module.power_draw(device)
        return CardReading(percent / 100, milliwatts / 1000, float(module.temperature(device)))

    def _watch(self) -> None:
        pause = threading.Event()
        while self.last is not None:
            pause.wait(SECONDS)
            try:
                self.last = self._read()
            except Exception:  # the card is lost: the step says so
                self.last = None
