//! Shorter pages of lists whose objects are large.
//!
//! A tenant can fill a claim with a megabyte, and a response is in memory as a whole before its objects are pruned. So a page that
//! becomes too long is given up while it is received, and requested again with fewer objects. The API server continues
//! a list after a page of any length, so the caller notices nothing.

use std::collections::HashMap;
use std::sync::Arc;

use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Method, Request, Response, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body as HttpBody, Bytes};
use kube::client::Body;
use parking_lot::Mutex;
use tower::{BoxError, Service, ServiceExt};

/// The longest page of more than one object. 500 usual claims or volumes take less than half of it.
const LONGEST_PAGE: usize = 4 << 20;

/// Limits the pages of lists.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pages {
    /// The number of objects of a page that is expected not to be too long, by the path of the list.
    expected: Arc<Mutex<HashMap<String, u32>>>,
}

impl Pages {
    fn expected(&self, list: &Uri) -> u32 {
        self.expected.lock().get(list.path()).copied().unwrap_or(u32::MAX)
    }

    fn expect(&self, list: &Uri, size: u32, requested: u32) {
        let mut expected = self.expected.lock();
        if size < requested {
            expected.insert(list.path().to_owned(), size);
        } else {
            expected.remove(list.path());
        }
    }

    /// Sends a request. A list may get fewer objects than it requests.
    pub(crate) async fn send<S, B>(
        self,
        service: S,
        request: Request<Body>,
    ) -> Result<Response<UnsyncBoxBody<Bytes, BoxError>>, BoxError>
    where
        S: Service<Request<Body>, Response = Response<B>, Error: Into<BoxError>> + Clone,
        B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let Some(requested) = page_size(&request) else {
            let response = service.oneshot(request).await.map_err(Into::into)?;
            return Ok(response.map(|body| body.map_err(Into::into).boxed_unsync()));
        };
        let (parts, _empty) = request.into_parts();
        let mut size = self.expected(&parts.uri).clamp(1, requested);
        loop {
            let response = service.clone().oneshot(of_size(&parts, size)?).await.map_err(Into::into)?;
            let (head, body) = response.into_parts();
            // The caller wants the object, however long it is.
            let longest = if size == 1 { usize::MAX } else { LONGEST_PAGE };
            match Limited::new(body, longest).collect().await {
                Ok(page) => {
                    let page = page.to_bytes();
                    if head.status.is_success() {
                        self.expect(&parts.uri, next_size(size, page.len()), requested);
                    }
                    return Ok(Response::from_parts(head, whole(page)));
                }
                Err(error) if error.is::<LengthLimitError>() => {
                    tracing::debug!(uri = %parts.uri, size, "a page is too long; requesting a shorter one");
                    size = (size / 8).max(1);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Returns a body that was read.
pub(super) fn whole(body: Bytes) -> UnsyncBoxBody<Bytes, BoxError> {
    Full::new(body).map_err(|never| match never {}).boxed_unsync()
}

/// Returns the number of objects that a list requests at once. A watch has no pages.
fn page_size(request: &Request<Body>) -> Option<u32> {
    let query = request.uri().query().filter(|_| request.method() == Method::GET)?;
    query.split('&').find_map(|pair| pair.strip_prefix("limit=")?.parse().ok())
}

/// Returns the size of pages half as long as the longest, if the objects of the next ones are as long as those of this one.
fn next_size(size: u32, length: usize) -> u32 {
    let next = u64::from(size) * (LONGEST_PAGE as u64 / 2) / (length as u64).max(1);
    u32::try_from(next).unwrap_or(u32::MAX)
}

fn of_size(list: &Parts, size: u32) -> Result<Request<Body>, http::Error> {
    let pairs = list.uri.query().unwrap_or_default().split('&');
    let others: String =
        pairs.filter(|pair| !pair.starts_with("limit=")).map(|pair| format!("&{pair}")).collect();
    let mut uri = list.uri.clone().into_parts();
    uri.path_and_query = Some(PathAndQuery::try_from(format!("{}?limit={size}{others}", list.uri.path()))?);
    let mut request = Request::new(Body::empty());
    *request.method_mut() = list.method.clone();
    *request.uri_mut() = Uri::from_parts(uri)?;
    *request.headers_mut() = list.headers.clone();
    *request.extensions_mut() = list.extensions.clone();
    Ok(request)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::api::ListParams;
    use kube::{Api, Client, ResourceExt};
    use rstest::rstest;
    use serde_json::{Value, json};
    use tower::{Layer, service_fn};

    use super::*;
    use crate::api::list;
    use crate::api::request::layer;

    /// Lists `count` objects of `length` bytes each from a server that continues as the API server does. Returns how many objects the
    /// server sent in each page.
    async fn pages(count: usize, length: usize) -> Vec<usize> {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&sent);
        let server = service_fn(move |request: Request<Body>| {
            let query = request.uri().query().unwrap_or_default();
            let parameter = |name: &str| {
                query
                    .split('&')
                    .find_map(|pair| pair.strip_prefix(name))
                    .map_or(0, |value| value.parse().unwrap())
            };
            let (start, limit) = (parameter("continue="), parameter("limit="));
            let end = count.min(start + limit);
            log.lock().push(end - start);
            let token = if end < count { end.to_string() } else { String::new() };
            let items: Vec<Value> = (start..end)
                .map(|number| json!({"metadata": {"name": number.to_string()}, "data": {"a": "x".repeat(length)}}))
                .collect();
            let page = json!({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"continue": token}, "items": items});
            std::future::ready(Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(page.to_string())))))
        });
        let pages = Pages::default();
        let client = Client::new(
            layer(move |service, request| pages.clone().send(service, request)).layer(server),
            "shop",
        );
        let objects =
            list::of_items(&Api::<ConfigMap>::all(client), ListParams::default(), |_| true).await.unwrap();
        let names: Vec<_> = objects.iter().map(ResourceExt::name_any).collect();
        assert_eq!(
            names,
            (0..count).map(|number| number.to_string()).collect::<Vec<_>>(),
            "each object once"
        );
        sent.lock().clone()
    }

    #[rstest]
    #[case::nothing(0, 10, &[0])]
    #[case::usual(1200, 1 << 10, &[500, 500, 200])]
    #[case::large(100, 250 << 10, &[100, 62, 7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 5])]
    #[case::longer_than_a_page(3, 5 << 20, &[3, 3, 3, 1, 1, 1])]
    #[tokio::test]
    async fn pages_of_large_objects_have_fewer(
        #[case] count: usize,
        #[case] length: usize,
        #[case] sent: &[usize],
    ) {
        assert_eq!(pages(count, length).await, sent);
    }
}
