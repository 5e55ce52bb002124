"""Bring the application up on a local or a running Ray cluster, wait until it serves, take it down again."""

import contextlib
import functools
import signal
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from serving.config.app import INGRESS, AppConfig
from serving.config.base import ConfigError
from serving.config.engine import REPLICA
from serving.config.model_tables import check_external_scaler, tables_of
from serving.config.serve_file import applications_of, check_apart, load_document, prefix_of, read_application
from serving.config.serve_schema import check_serve_keys
from serving.ingress.replica_status import pages_of
from serving.launch.arguments import Options, to_document
from serving.launch.dashboard import serve_client
from serving.launch.http_port import check_port_free
from serving.launch.kernels import Compilation, compiling
from serving.launch.local_ray import LaunchError, local_ray
from serving.launch.running import announced
from serving.launch.status import describe_start
from serving.launch.steps import steps_shown

NO_OPTIONS = Options()
UNREACHED_S = 60.0  # that nothing answers where an application runs, before that is an error: its proxy starts too


def up(words: Sequence[str], options: Options = NO_OPTIONS, log_level: str | None = None) -> None:
    """Deploy and stay up until Ctrl-C.

    Args:
        words: a Serve configuration file or a model, then flags of ``vllm serve``.
        options: this command's own flags; without an address a local Ray is started and stopped.
        log_level: what engines log is shown at this level and above.

    Raises:
        ConfigError, LaunchError: naming what is wrong.
    """
    console = Console(stderr=True)
    flags = [*words, *(["--log-level", log_level] if log_level else [])]
    with contextlib.ExitStack() as stack:
        address, is_ours = options.address, options.address is None
        compilation = stack.enter_context(compiling()) if address is None else None
        with console.status("Reading the configuration"):
            document, source = to_document(flags, options)
            apps = check_documents(document, source)
            patience_s = max(app.start_timeout_s for app in apps)
        if address is None:
            check_models(apps)
            check_port_free(document, "; choose another one with --port")
            address = stack.enter_context(local_ray(console, shows_logs=log_level is not None))
        deploy(address, document, console, patience_s, compilation)
        for place, url in enumerate(urls := urls_of(document, address)):
            stack.enter_context(announced(url, address, place))
        end = "Ctrl-C stops." if is_ours else "it stays deployed after Ctrl-C."
        console.print(f"Serving at [bold]{' and '.join(urls)}[/bold]; {end}")
        wait_for_interrupt()


def read_document(config: Path, port: int | None = None) -> dict[str, Any]:
    """The Serve file as a document, with every part of it that is ours checked."""
    document = load_document(config)
    check_document(document, str(config))
    if port is not None:
        document.setdefault("http_options", {})["port"] = port
    return document


def check_document(document: dict[str, Any], source: str) -> AppConfig:
    """Our first application's configuration; ``source`` names the document in ``ConfigError``."""
    return check_documents(document, source)[0]


def check_documents(document: dict[str, Any], source: str) -> list[AppConfig]:
    """The configurations of all our applications; raises ``ConfigError`` as ``check_document`` does."""
    apps = applications_of(document)
    configs = [_check_application(document, source, place) for place in range(len(apps))]
    check_apart(apps, configs, source)
    try:
        check_serve_keys(document)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from None
    return configs


def _check_application(document: dict[str, Any], source: str, place: int) -> AppConfig:
    app, user_config = read_application(document, source, place)
    try:
        check_external_scaler(applications_of(document)[place], app, tables_of(user_config, app))
    except ConfigError as error:
        raise error.below(f"{source}: deployments.{INGRESS}.user_config") from None
    return app


def server_of(document: dict[str, Any], address: str = "") -> str:
    """Where Serve listens; on all interfaces of the cluster whose dashboard is at ``address``, or of this machine."""
    options = document.get("http_options") or {}
    host = str(options.get("host", "127.0.0.1"))
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    if host in local:
        host = urlsplit(address).hostname or local[host]
    return f"http://{f'[{host}]' if ':' in host else host}:{options.get('port', 8000)}"


def urls_of(document: dict[str, Any], address: str = "") -> list[str]:
    """Where each of our applications answers; ``address`` as of ``server_of``."""
    return [server_of(document, address) + prefix_of(app) for app in applications_of(document)]


def url_of(document: dict[str, Any]) -> str:
    """Where the first of our applications answers."""
    return urls_of(document)[0]


def check_models(apps: Sequence[AppConfig]) -> None:
    """Say at once that there is no such folder on this machine, which engines and ingresses would find out."""
    for model in (each.model.id for app in apps for each in app.each):
        if model.startswith(("/", "./", "../")) and not Path(model).exists():
            raise LaunchError(f"model.id: there is no {model} on this machine")


def deploy(
    address: str,
    document: dict[str, Any],
    console: Console,
    patience_s: float = REPLICA.start_timeout_s,
    compilation: Compilation | None = None,
) -> None:
    """Send the document to Serve as ``serve deploy`` does, and wait with a progress display until it runs.

    What starts meanwhile waits for ``compilation``, which is shown beside it.
    """
    client = serve_client(address)
    client.deploy_applications(document)
    apps, urls = applications_of(document), urls_of(document, address)
    waiting = {app.get("name", "default"): url for app, url in zip(apps, urls, strict=True)}
    models = {app.get("name", "default"): read_application(document, "", k)[0] for k, app in enumerate(apps)}
    unreached_s = dict[str, float]()
    with steps_shown(console, "Deploying") as show:
        give_up_s = time.monotonic() + patience_s
        while time.monotonic() < give_up_s:
            told = client.get_serve_details()["applications"]
            waiting = {
                name: url for name, url in waiting.items() if not is_up(name, told.get(name, {}), url, models[name])
            }
            if not waiting:
                return
            for name, url in waiting.items():
                check_reached(name, told.get(name, {}), url, unreached_s)
            name, url = next(iter(waiting.items()))
            lines = [describe(told.get(name, {})), *starts_of(url), compilation.progress() if compilation else ""]
            show("; ".join(filter(None, lines)))
            time.sleep(0.25)
    raise LaunchError(f"the application did not start within {patience_s:g} s (fleet.start_timeout_s)")


def is_up(name: str, details: dict[str, Any], url: str, config: AppConfig) -> bool:
    """Whether an application serves, all of its models; ``details`` are Serve's.

    Raises:
        LaunchError: it never will.
    """
    if details.get("status") in ("DEPLOY_FAILED", "UNHEALTHY"):
        raise LaunchError(f"the application {name!r} did not start: {last_line(details)}")
    if details.get("status") != "RUNNING" or not is_healthy(url):
        return False
    wanted = wanted_models(details, config)
    return not wanted or wanted <= living_models(url)


def check_reached(name: str, details: dict[str, Any], url: str, unreached_s: dict[str, float]) -> None:
    """Raise ``LaunchError`` where an application runs and nothing has answered at its address for ``UNREACHED_S``.

    ``unreached_s`` remembers since when, by application.
    """
    now_s = time.monotonic()
    if details.get("status") != "RUNNING" or is_answered(url):
        unreached_s.pop(name, None)
    elif now_s - unreached_s.setdefault(name, now_s) > UNREACHED_S:
        reason = f"nothing answers at {url} from here; check http_options.host and port, and the way to the cluster"
        raise LaunchError(f"the application {name!r} runs, but {reason}")


def _get(url: str, timeout_s: float) -> httpx.Response:
    return httpx.get(url, timeout=timeout_s, verify=_certificates())


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: httpx reads them for every call otherwise, and a start asks several times a second."""
    return httpx.create_ssl_context()


def is_answered(url: str) -> bool:
    """Whether a server is there, however slow, whatever it says."""
    try:
        _get(f"{url}/health", 5.0)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return False
    except httpx.TransportError:
        pass
    return True


def is_healthy(url: str) -> bool:
    """Whether the ingress answers, and a replica lives of every model that may not be without."""
    try:
        return _get(f"{url}/health", 5.0).status_code == 200
    except httpx.HTTPError:
        return False


def wanted_models(details: dict[str, Any], config: AppConfig) -> set[str]:
    """The models of which Serve is asked for a replica: a fleet may be scaled to zero."""
    deployments = details.get("deployments", {})
    empty = {name for name, told in deployments.items() if told.get("target_num_replicas") == 0}
    return {each.model.name for each in config.each if any(g.deployment not in empty for g in each.replica_groups())}


def living_models(url: str) -> set[str]:
    """The models of which a replica lives. ``/health`` does not tell of a fleet that may be empty."""
    try:
        pages = pages_of(_get(f"{url}/polyslo/status", 5.0).json())
        return {page["model"] for page in pages if any(replica.get("live") for replica in page["replicas"])}
    except (httpx.HTTPError, ValueError, KeyError):
        return set()


def describe(details: dict[str, Any]) -> str:
    """One line on how far a deployment has come."""
    parts = []
    for name, deployment in details.get("deployments", {}).items():
        states = [replica.get("state") for replica in deployment.get("replicas", [])]
        wanted = deployment.get("target_num_replicas") or len(states)
        parts.append(f"{name} {states.count('RUNNING')}/{wanted}")
    return "Starting " + ", ".join(parts) if parts else "Deploying"


def starts_of(url: str) -> list[str]:
    """A line on each replica that starts, where an ingress answers already."""
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
        return [describe_start(start) for start in _get(f"{url}/polyslo/status", 1.0).json()["starting"]]
    return []


def last_line(details: dict[str, Any]) -> str:
    """What a person needs of Serve's message, which holds a whole traceback; of pydantic's errors, the first."""
    told = [details.get("message", "")] + [d.get("message", "") for d in details.get("deployments", {}).values()]
    lines = [line.strip() for text in told for line in text.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if "Error: " in line or "Exception: " in line]
    if errors and "validation error" in lines[errors[-1]]:
        reason, is_told, _ = " ".join(lines[errors[-1] + 1 :]).partition(" [type=")
        return reason.replace("Value error, ", "", 1) if is_told else lines[errors[-1]]
    return lines[errors[-1]] if errors else (lines or ["no reason given"])[-1]


def wait_for_interrupt() -> None:
    """Block until SIGINT or SIGTERM."""
    stop = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        while not stop.wait(0.5):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)
