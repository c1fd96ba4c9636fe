//! Shows errors of the API server as the text of its message only.

/// Returns the error as the message of the API server, if the API server sent one.
pub fn api_error(error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) => {
            anyhow::anyhow!("the API server answers {}: {}", status.code, status.message)
        }
        error => error.into(),
    }
}
