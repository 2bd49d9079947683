"""The name of a data set of the Hugging Face Hub: hf:org/name@revision/config:split."""

import re
from dataclasses import dataclass

HUB_FORMS = (
    "write hf:ORG/NAME, hf:ORG/NAME/CONFIG or hf:ORG/NAME/CONFIG:SPLIT; a commit: hf:ORG/NAME@COMMIT/CONFIG"
)
_PREFIX = "hf:"
_WORD = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"hf:({_WORD}/{_WORD})(?:@({_WORD}))?(?:/({_WORD}))?(?::({_WORD}))?", re.ASCII)


@dataclass(frozen=True)
class HubDataset:
    """A split of a data set: hf:org/name, hf:org/name/config, and either with :split behind it.

    revision: a commit of the data set's parquet files; None: their newest state.
    """

    repository: str
    config: str | None
    split: str
    revision: str | None = None

    @staticmethod
    def is_named(source: str) -> bool:
        """Whether a source names a data set of the Hub, rightly or not."""
        return source.startswith(_PREFIX)

    @classmethod
    def of(cls, source: str) -> "HubDataset | None":
        """Parse a source; None if it is not of this form. The split is train where none is named."""
        match = _NAME.fullmatch(source)
        return None if match is None else cls(match[1], match[3], match[4] or "train", match[2])

    @classmethod
    def source_of(cls, repository: object, config: object = None, split: object = None) -> str | None:
        """Return the source that names a data set as another program does; None if the Hub has no such names."""
        parts = (("hf:", repository), ("/", config), (":", split))
        source = "".join(f"{mark}{part}" for mark, part in parts if part)
        return None if cls.of(source) is None else source

    def __str__(self) -> str:
        config = "" if self.config is None else f"/{self.config}"
        return f"{self.base}{config}:{self.split}"

    @property
    def base(self) -> str:
        """The name up to the configuration."""
        return f"{_PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")
