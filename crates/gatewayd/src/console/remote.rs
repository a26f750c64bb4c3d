//! Consoles of other servers.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::Request;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Maximum time for an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum size of an answer, bytes.
const MAX_ANSWER: usize = 8 << 20;

/// The console of another server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Remote(SocketAddr);

/// Why a console does not answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum RemoteError {
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Late,
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    #[error("the connection failed: {0}")]
    Http(#[from] hyper::Error),
    #[error("it answers with status {0}")]
    Status(u16),
    #[error("the answer is too long or is cut off: {0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    #[error("the answer is not a console's: {0}")]
    Json(serde_json::Error),
}

impl Remote {
    /// The other console's view of its own server.
    pub(super) async fn view(&self) -> Result<serde_json::Value, RemoteError> {
        tokio::time::timeout(PATIENCE, self.ask()).await.unwrap_or(Err(RemoteError::Late))
    }

    async fn ask(&self) -> Result<serde_json::Value, RemoteError> {
        let stream = TcpStream::connect(self.0).await.map_err(RemoteError::Connect)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.uri_mut() = hyper::Uri::from_static("/v1/server");
        // An address is always a valid header.
        if let Ok(host) = self.0.to_string().parse() {
            request.headers_mut().insert(HOST, host);
        }
        let answer = sender.send_request(request).await?;
        if !answer.status().is_success() {
            return Err(RemoteError::Status(answer.status().as_u16()));
        }
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await.map_err(RemoteError::Body)?;
        connection.abort();
        let view: serde_json::Value = serde_json::from_slice(&body.to_bytes()).map_err(RemoteError::Json)?;
        Ok(view)
    }
}

impl FromStr for Remote {
    type Err = String;

    fn from_str(text: &str) -> Result<Remote, String> {
        let address = text.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        let address = address.and_then(|address| address.parse().ok());
        address.map(Remote).ok_or_else(|| format!("{text:?} is not the URL of a console; use http://ADDRESS:PORT"))
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_are_urls_of_consoles() {
        for good in ["http://10.0.0.2:9192", "http://10.0.0.2:9192/", "http://[fd00::2]:9192"] {
            assert_eq!(good.parse::<Remote>().unwrap().to_string(), good.trim_end_matches('/'));
        }
        for bad in ["10.0.0.2:9192", "https://10.0.0.2:9192", "http://10.0.0.2", "http://host:9192", ""] {
            assert!(bad.parse::<Remote>().unwrap_err().contains("http://ADDRESS:PORT"), "{bad}");
        }
    }
}
