"""What we measure, and how. Each module is a program of its own."""
