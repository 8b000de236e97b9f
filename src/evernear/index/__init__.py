"""Gallery embeddings become a FAISS index that turns neighbours into a label, or into "unknown"."""
