//! Heads that cannot be read never reach a handler: hyper refuses them by itself, with a status and no body. On their way
//! out its refusals get the body that every other error has.

use crate::error::ApiError;
use axum::http::StatusCode;
use std::io::Result;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection whose refusals are explained.
pub struct Explained<S> {
    io: Pin<Box<S>>,
    /// A refusal with its body, and how much of it was sent.
    refusal: Vec<u8>,
    sent: usize,
}

impl<S: AsyncWrite> Explained<S> {
    pub fn new(io: S) -> Self {
        Self {
            io: Box::pin(io),
            refusal: Vec::new(),
            sent: 0,
        }
    }

    fn poll_refusal(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        while self.sent < self.refusal.len() {
            let rest = &self.refusal[self.sent..];
            match ready!(self.io.as_mut().poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(std::io::ErrorKind::WriteZero.into())),
                n => self.sent += n,
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// The same answer with a body, if it is one of hyper's own: no other has none.
fn explained(answer: &[u8]) -> Option<Vec<u8>> {
    let code = answer.strip_prefix(b"HTTP/1.1 ")?.get(..3)?;
    let (code, why) = match code {
        b"400" => ("bad_head", "the request's line or a header cannot be read"),
        b"414" => ("uri_too_long", "the request's path is too long"),
        b"431" => (
            "head_too_large",
            "the request's headers are too long or too many",
        ),
        _ => return None,
    };
    let text = std::str::from_utf8(answer).ok()?;
    let (before, after) = text.split_once("\r\ncontent-length: 0\r\n")?;
    let status = StatusCode::from_bytes(&answer[9..12]).ok()?;
    let body = ApiError::new(status, code, why).to_json().to_string();
    let length = body.len();
    let head = format!(
        "{before}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{after}"
    );
    Some((head + &body).into_bytes())
}

impl<S: AsyncWrite> AsyncWrite for Explained<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_refusal(cx))?;
        match explained(buf) {
            Some(refusal) => {
                (this.refusal, this.sent) = (refusal, 0);
                Poll::Ready(Ok(buf.len())) // sent by the flush that follows
            }
            None => this.io.as_mut().poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_refusal(cx))?;
        this.io.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_refusal(cx))?;
        this.io.as_mut().poll_shutdown(cx)
    }
}

impl<S: AsyncRead> AsyncRead for Explained<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        self.get_mut().io.as_mut().poll_read(cx, buf)
    }
}
