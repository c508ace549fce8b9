"""Records: bytes as drawn, two paths that agree, and nothing hostile gets through."""
