"""Code that knows trainers. Each trainer's package is imported only when it is used."""
