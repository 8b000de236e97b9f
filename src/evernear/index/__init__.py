"""The FAISS index of the gallery. Neighbors determine a label or "unknown"."""
