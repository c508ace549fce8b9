"""The store's parts, each by itself."""
