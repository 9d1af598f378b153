"""TransferQueue (the package `transferqueue`, extra `tq`) as data plane and participant.

Import something of this package before `transfer_queue` itself: that one reads these settings
when it is imported. What the environment says already stands.
"""

import os

# Its default of 8 serialising threads warns at every put on a host with fewer cores.
os.environ.setdefault("TQ_NUM_THREADS", "2")
# Seconds that a client waits for a storage unit; must be longer than the longest save. Our own
# deadlines are shorter and are the ones that count.
os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", "600")
os.environ.setdefault("TQ_LOGGING_LEVEL", "WARNING")
# Ray asks a server of its makers at start; without network that costs 10 s.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
