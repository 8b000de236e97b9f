"""KServe's way into the prediction core: a predictor, and a transformer that prepares images in front of it."""
