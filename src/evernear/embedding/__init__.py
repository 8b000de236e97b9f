"""The embedding network: trained with ArcFace, exported to TorchScript, run over the gallery."""
