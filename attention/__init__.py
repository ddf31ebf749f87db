"""What a forward pass is fed (rows), the KV layout as data, and the caches built from it."""
