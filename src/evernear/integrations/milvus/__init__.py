"""Galleries in Milvus, and an alias there that follows the champion."""
