"""The version of megalite, which checkpoints, model cards and `--version` name, and those of installed packages."""

__version__ = "0.1.0"


def package_version(package: str) -> str:
    """Return the version of an installed package; "" for another one."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
