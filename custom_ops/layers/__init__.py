"""What lies around attention: embeddings, norms, gates, products. The ops: schema.py."""
