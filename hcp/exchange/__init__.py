"""Move rows between ranks.

The doors are ``transport.Transport``, what a transport must do, and ``connect.connect``, which
picks one for a job. ``tables`` says which rows go where, ``agreement`` stamps every exchange.
"""
