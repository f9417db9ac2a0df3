"""Entry point "torch.backends": `import torch` alone makes the device known. A failure here must never break `import torch`."""

from __future__ import annotations

import warnings


def load() -> None:
    """Register the device, or say in a warning why not."""
    try:
        import lazy_backend  # noqa: F401  (importing registers; here, not above, so that its errors are caught)
    except Exception as error:  # whatever it is, torch has to go on loading
        warnings.warn(f"the device lazysched is not available: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
