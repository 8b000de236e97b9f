"""KServe servers: a predictor, and a transformer that prepares images for the predictor."""

import sys
from importlib.util import find_spec

from evernear.common.extras import not_installed

# ``python -m`` sets this name while it looks for a server's module, which imports kserve first.
if sys.argv[0] == "-m" and find_spec("kserve") is None:
    raise SystemExit(f"evernear: {not_installed('kserve', 'evernear[model,kserve]')}")
