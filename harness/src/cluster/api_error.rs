//! What the API server says when it refuses, without the structure it says it in.

/// The error with just the message of the API server, where it is one of its answers.
pub(crate) fn api_error(error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) => {
            anyhow::anyhow!("the API server answers {}: {}", status.code, status.message)
        }
        error => error.into(),
    }
}
