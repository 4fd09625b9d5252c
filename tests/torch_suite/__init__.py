"""What torch's own tests ask of Gloo, asked of both Gloo and baguanet.

Written anew by what they check; docs/transport.md lists what is here, what is elsewhere, and what is left out
and why. A behaviour that Gloo lacks or that is baguanet's own is in tests/comm/test_backend_*.py.
"""

from __future__ import annotations
