"""Serve's own client of a cluster's dashboard, with Ray's token, and errors of one line."""

import logging
from typing import Any

from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.exceptions import AuthenticationError

from serving.launch.local_ray import LaunchError

TOKEN_PLACES = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token"


class ServeClient(ServeSubmissionClient):
    """Raises ``LaunchError`` whatever is wrong with the address, the token or the answer."""

    def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
        try:
            return super()._do_request(method, endpoint, **more)
        except AuthenticationError:
            why = "refuses the token that was found in" if self._headers else "needs a token, and none was found in"
            raise LaunchError(f"--address: the cluster at {self._address} {why} {TOKEN_PLACES}") from None
        except OSError as error:
            raise LaunchError(
                f"--address: cannot reach a dashboard at {self._address} ({type(error).__name__})"
            ) from None

    def _raise_error(self, r: Any) -> None:
        last = (r.text.strip().splitlines() or ["nothing"])[-1]  # of a traceback
        raise LaunchError(f"the dashboard at {self._address} answered HTTP {r.status_code}: {last[:300]}")


def serve_client(address: str) -> ServeClient:
    """The client of the dashboard at ``address`` (http://host:port), with a token where Ray's own tools find one.

    Raises:
        LaunchError: naming what is wrong with the address or the token.
    """
    _use_token()
    try:
        return ServeClient(address)
    except LaunchError:
        raise
    except (ValueError, KeyError, RuntimeError, OSError):
        raise LaunchError(f"--address: no dashboard of Ray answers at {address}") from None


def _use_token() -> None:
    """Take the token that Ray's tools would take; Ray's warnings about it are for those who start a cluster."""
    logger = logging.getLogger("ray._private.authentication.authentication_token_setup")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except Exception as error:
        raise LaunchError(f"Ray's token cannot be read: {str(error).splitlines()[0]}") from None
    finally:
        logger.setLevel(level)
