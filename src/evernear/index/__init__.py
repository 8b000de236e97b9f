"""Gallery embeddings become a FAISS index that turns neighbors into a label, or into "unknown"."""
