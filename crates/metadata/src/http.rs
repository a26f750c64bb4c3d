//! The subset of HTTP/1.1 that metadata clients need (RFC 9112): one GET or HEAD per connection.

use std::borrow::Cow;

use crate::MAX_REQUEST;
use crate::documents::Documents;

/// A response.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The whole response, headers included.
    pub(crate) bytes: Vec<u8>,
    /// Whether it is a document, not an error.
    pub(crate) is_document: bool,
}

/// The response to the received bytes; `None`: the request is incomplete.
pub(crate) fn answer(request: &[u8], about: &Documents) -> Option<Reply> {
    let end = request.windows(4).position(|window| window == b"\r\n\r\n");
    let Some(end) = end.filter(|end| end + 4 <= MAX_REQUEST) else {
        return (request.len() > MAX_REQUEST).then(|| error("431 Request Header Fields Too Large", ""));
    };
    Some(match target(&request[..end]) {
        Ok((path, has_body)) => match about.find(path) {
            Some(document) => reply("200 OK", "", &document, has_body),
            None => error("404 Not Found", ""),
        },
        Err(Refused::BadRequest) => error("400 Bad Request", ""),
        Err(Refused::Forwarded) => error("403 Forbidden", ""),
        Err(Refused::Method) => error("405 Method Not Allowed", "Allow: GET, HEAD\r\n"),
    })
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq)]
enum Refused {
    BadRequest,
    /// A proxy in the guest forwards another client's request.
    Forwarded,
    Method,
}

/// The path of a request, and whether the response has a body.
fn target(head: &[u8]) -> Result<(&str, bool), Refused> {
    let head = std::str::from_utf8(head).map_err(|_| Refused::BadRequest)?;
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(path), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Refused::BadRequest);
    };
    let is_path = path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_path || !["HTTP/1.0", "HTTP/1.1"].contains(&version) {
        return Err(Refused::BadRequest);
    }
    for line in lines {
        let (name, _) = line.split_once(':').ok_or(Refused::BadRequest)?;
        if name.eq_ignore_ascii_case("x-forwarded-for") || name.eq_ignore_ascii_case("forwarded") {
            return Err(Refused::Forwarded);
        }
    }
    let path = path.split('?').next().unwrap_or_default();
    match method {
        "GET" => Ok((path, true)),
        "HEAD" => Ok((path, false)),
        _ => Err(Refused::Method),
    }
}

fn error(status: &str, header: &str) -> Reply {
    let body = format!("{status}\n");
    Reply { is_document: false, ..reply(status, header, &Cow::Borrowed(body.as_bytes()), true) }
}

fn reply(status: &str, header: &str, body: &[u8], has_body: bool) -> Reply {
    let len = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len}\r\n{header}Connection: close\r\n\r\n"
    );
    let mut bytes = head.into_bytes();
    bytes.extend_from_slice(if has_body { body } else { &[] });
    Reply { bytes, is_document: true }
}
