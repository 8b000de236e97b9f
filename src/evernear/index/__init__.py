"""The FAISS index of the gallery: neighbors determine a label, or "unknown"."""
