//! Pages of metrics in the text format of Prometheus.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use testvm_cluster::api_error::api_error;

/// Returns the labels and the value of each series of a metric.
pub(super) fn series(page: &str, name: impl Into<String>) -> impl Iterator<Item = (Labels<'_>, f64)> {
    let name = name.into();
    page.lines().filter_map(move |line| {
        let rest = line.strip_prefix(&name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once("} ")?,
            None => ("", rest.strip_prefix(' ')?),
        };
        // A value that is no number fails each comparison.
        Some((Labels(labels), value.parse().unwrap_or(f64::NAN)))
    })
}

/// Returns the value of a metric without labels, or `None` if the page has no such metric.
pub(super) fn value(page: &str, name: &str) -> Option<f64> {
    series(page, name).find(|(labels, _)| labels.0.is_empty()).map(|(_, value)| value)
}

/// The labels of a series, such as `a="x",b="y"`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Labels<'a>(&'a str);

impl<'a> Labels<'a> {
    pub(super) fn get(self, name: &str) -> Option<&'a str> {
        self.0.split(',').find_map(|label| label.strip_prefix(name)?.strip_prefix("=\"")?.strip_suffix('"'))
    }
}

/// Returns the metrics of the API server.
pub(super) async fn of_api_server(client: &Client) -> Result<String> {
    let request = http::Request::get("/metrics").body(Vec::new()).context("create a request")?;
    client.request_text(request).await.map_err(api_error).context("read the API server's metrics")
}

/// Returns the processor time that the process of this page has used since its start.
pub(super) fn processor_time(page: &str) -> Result<Duration> {
    const NAME: &str = "process_cpu_seconds_total";
    let seconds = value(page, NAME).with_context(|| format!("there is no metric {NAME}"))?;
    Duration::try_from_secs_f64(seconds).with_context(|| format!("{NAME} is {seconds}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_is_found_by_whole_name() {
        let page = "# TYPE cpu_seconds_total counter\ncpu_seconds_total 1.5e+2\ncpu{a=\"b\",c=\"d\"} 3\n";
        assert_eq!(value(page, "cpu_seconds_total"), Some(150.0));
        assert_eq!(value(page, "cpu_seconds"), None);
        assert_eq!(value(page, "cpu"), None);
        let (labels, value) = series(page, "cpu").next().unwrap();
        assert_eq!((labels.get("c"), labels.get("b"), value), (Some("d"), None, 3.0));
    }
}
