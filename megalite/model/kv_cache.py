"""Keys and values of the tokens generated so far, one buffer a layer."""

from torch import Tensor


class KeyValueCache:
    """Room for `capacity` tokens of every layer: [B, capacity, kv heads of this rank, head_dim]."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, S, kv heads, head_dim] for one layer; return all keys and values up to and with them."""
        if layer not in self._layers:
            room = (key.shape[0], self.capacity, *key.shape[2:])
            self._layers[layer] = (key.new_empty(room), value.new_empty(room))
        keys, values = self._layers[layer]
        stop = self.length + key.shape[1]
        keys[:, self.length : stop] = key
        values[:, self.length : stop] = value
        return keys[:, :stop], values[:, :stop]

    def advance(self, tokens: int) -> None:
        """Count `tokens` as held, after every layer has been extended by them."""
        self.length += tokens
