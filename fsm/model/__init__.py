"""What the explorer (`fsm.explore`) walks: small worlds around the real tables.

Two rules: which state follows which is asked of the `Table` objects that the engine and the
servers use, never written down here; everything else that the engine and the gate do is
declared as data (`programs.py`, `Guard`), so that a test can leave any of it out and see a rule
break.
"""
