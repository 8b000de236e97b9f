"""KServe servers: a predictor, and a transformer that prepares images for the predictor."""

from importlib.util import find_spec

from evernear.common.extras import not_installed

if find_spec("kserve") is None:  # the modules below import it before they can report anything
    raise SystemExit(f"evernear: {not_installed('kserve', 'evernear[model,kserve]')}")
