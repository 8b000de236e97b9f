"""Galleries in Milvus, and a Milvus alias that follows the champion."""
