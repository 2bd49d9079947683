"""Keys and values of the tokens generated so far, one buffer a layer."""

from torch import Tensor


class KeyValueCache:
    """Room for `capacity` tokens of every layer: [B, prefix + capacity, kv heads of this rank, head_dim].

    length: the tokens held. Virtual tokens in front of them count neither here nor in `capacity`.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor, prefix: int = 0) -> tuple[Tensor, Tensor]:
        """Append [B, S, kv heads, head_dim] for one layer; return all keys and values up to and with them.

        prefix: how many of the S are virtual tokens; only in front of the first tokens of a layer.
        """
        if layer not in self._layers:
            room = (key.shape[0], prefix + self.capacity, *key.shape[2:])
            self._layers[layer] = (key.new_empty(room), value.new_empty(room))
        keys, values = self._layers[layer]
        start = keys.shape[1] - self.capacity + self.length - prefix
        stop = start + key.shape[1]
        keys[:, start:stop] = key
        values[:, start:stop] = value
        return keys[:, :stop], values[:, :stop]

    def advance(self, tokens: int) -> None:
        """Count `tokens` as held, after every layer has been extended by them."""
        self.length += tokens
