"""The code that knows trainers. Each package is imported only when it is used."""
