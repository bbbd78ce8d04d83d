"""How long tests wait for what always ends: long enough on the busiest machine, it only ends runs that hang."""

PATIENCE_S = 900
