"""Code that tests share: ranks, references, small models. No test imports another test."""
