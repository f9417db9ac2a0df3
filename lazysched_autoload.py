"""Entry point "torch.backends": `import torch` alone makes the device known. A failure here must never break `import torch`."""

from __future__ import annotations

import warnings

LATE = "If a module of lazysched's was imported before torch: `import lazy_backend` now, or import torch first"


def load() -> None:
    """Register the device, or say in a warning why not."""
    try:
        import lazy_backend  # noqa: F401  (importing registers; here, not above, so that its errors are caught)
    except Exception as error:  # whatever it is, torch has to go on loading
        circular = isinstance(error, ImportError) and "partially initialized" in str(error)
        why = f"{type(error).__name__}: {error}" + f". {LATE}" * circular
        warnings.warn(f"the device lazysched is not available: {why}", RuntimeWarning, stacklevel=2)
