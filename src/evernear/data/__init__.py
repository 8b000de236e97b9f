"""Convert images from any source to a dataset that is validated, hashed and divided
into shards.
"""
