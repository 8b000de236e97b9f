"""KServe servers: a predictor, and a transformer that prepares images for the predictor."""
