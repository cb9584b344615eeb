"""Reads from URLs that the user names. The program sends HTTP requests only from here."""

from __future__ import annotations

import base64
import http.client
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPMessage
from typing import IO

from utils.address import Address, full_address
from utils.errors import UserError

STALL_S = 30.0  # seconds without a byte
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError)
_RESERVED = "%/:=&?~#+!$,;'@()*[]"  # characters of a URL that stay as they are


def is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def url_path(url: str) -> str:
    """Returns the unquoted path of the file in ``url``: ``photos/a b.jpg`` for
    ``https://host/photos/a%20b.jpg?v=2``."""
    return urllib.parse.unquote(re.split("[?#]", url.partition("://")[2])[0].partition("/")[2])


def open_url(url: str) -> http.client.HTTPResponse:
    """Sends a GET request and returns the response. A user and password in ``url`` are sent as HTTP basic
    authentication, but not to another host after a redirect. Raises one of `NETWORK_ERRORS` on failure."""
    try:
        return urllib.request.build_opener(_RedirectHandler).open(_request(full_address(url)), timeout=STALL_S)
    except (ValueError, http.client.InvalidURL) as error:  # also if the server redirects to such a URL
        # Python's text quotes the part that it does not understand, which may be a password.
        reason = "malformed host name" if isinstance(error, UnicodeError) else "malformed address"
        raise http.client.InvalidURL(reason) from None


def _request(url: str) -> urllib.request.Request:
    """Builds the request of `open_url`. Raises ValueError for a malformed URL."""
    without_login = re.sub("(?<=://)[^/?#]*@", "", url)
    address = re.sub("(?<=://)[^/?#]+", lambda host: host[0].encode("idna").decode(), without_login, count=1)
    request = urllib.request.Request(urllib.parse.quote(address, safe=_RESERVED), headers={"User-Agent": "lockstep"})
    login, separator, _ = urllib.parse.urlsplit(url).netloc.rpartition("@")
    if separator:
        token = base64.b64encode(urllib.parse.unquote_to_bytes(login)).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and sends the login again if host and port are the same, and the connection is as safe."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if req.type == "https" and not newurl.lower().startswith("https:"):
            raise urllib.error.URLError("the server redirects from https to an unencrypted address")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        authorization = req.unredirected_hdrs.get("Authorization")
        source = urllib.parse.urlsplit(req.full_url)
        target = urllib.parse.urlsplit(newurl)
        is_same_host = source.netloc == target.netloc and target.scheme in (source.scheme, "https")
        if request is not None and authorization and is_same_host:
            request.add_unredirected_header("Authorization", authorization)
        return request


def reason_of(error: BaseException) -> str:
    """Returns the reason of one of `NETWORK_ERRORS`."""
    reason = error if isinstance(error, urllib.error.HTTPError) else [type(error).__name__, *error.args][-1]
    return str(reason)


def read_url(url: str, *, max_bytes: int) -> bytes:
    """Reads the content at ``url``. Raises UserError if that fails, or if there are more than ``max_bytes`` bytes."""
    name = Address(url)
    try:
        with open_url(url) as response:
            content = response.read(max_bytes + 1)
            if response.length and len(content) <= max_bytes:
                raise ConnectionError(f"cut off after {len(content)} bytes")
    except NETWORK_ERRORS as error:
        raise UserError(f"{name}: cannot be downloaded ({reason_of(error)})") from None
    if len(content) > max_bytes:
        raise UserError(f"{name}: is larger than {max_bytes:,} bytes")
    return content
