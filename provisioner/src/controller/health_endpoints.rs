//! The HTTP endpoints `/metrics`, `/healthz` and `/readyz` of the role `controller`.

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use service::Gauges;
use tokio::sync::watch;

use crate::api::events::EventCounter;
use crate::api::policies::{self, Enforced};
use crate::api::traffic::ApiTraffic;

/// The prefix of the metrics. csi/monitoring/README.md lists them.
const PREFIX: &str = "loopfs_controller";

/// What the duties of this replica report. All copies share the values.
#[derive(Clone, Default)]
pub(crate) struct DutyReports {
    /// `true` once this replica leads and has read the objects that the duties of every controller need.
    pub(crate) performs: watch::Sender<bool>,
    /// The number of volumes whose node is not ready, while this replica leads.
    pub(crate) unready_volumes: Gauge,
    /// The number of volumes whose node was deleted, while this replica leads.
    pub(crate) lost_volumes: Gauge,
}

impl DutyReports {
    /// Sets the values of a replica that does not lead.
    pub(crate) fn reset(&self) {
        self.performs.send_replace(false);
        self.unready_volumes.set(0);
        self.lost_volumes.set(0);
    }

    fn register(&self, registry: &mut Registry) {
        let help = "Volumes whose node has not been ready for 5 minutes";
        registry.register("volumes_on_unready_nodes", help, self.unready_volumes.clone());
        let help = "Volumes whose Node object was deleted";
        registry.register("volumes_on_deleted_nodes", help, self.lost_volumes.clone());
    }
}

/// The source of the health endpoints' responses.
pub(crate) struct ControllerHealthEndpoints {
    pub(crate) events: EventCounter,
    pub(crate) traffic: ApiTraffic,
    pub(crate) leads: watch::Receiver<bool>,
    pub(crate) reports: DutyReports,
    pub(crate) policies: watch::Receiver<Enforced>,
}

impl service::HealthEndpoints for ControllerHealthEndpoints {
    async fn metrics(&self) -> Result<Registry, String> {
        let mut registry = service::registry(PREFIX);
        self.events.register(&mut registry);
        self.traffic.register(&mut registry);
        let leads = u64::from(*self.leads.borrow());
        registry.count("leads", "1 if this replica holds the Lease and performs the duties, else 0", leads);
        self.reports.register(&mut registry);
        policies::register(*self.policies.borrow(), &mut registry);
        Ok(registry)
    }

    /// Always succeeds. All tasks run, because the first to end would have ended the process. Restarting it does not repair an API
    /// server.
    async fn liveness(&self) -> Result<(), String> {
        Ok(())
    }

    /// Succeeds if this replica could perform the duties now, whether or not it leads. A replica that leads must also have read the
    /// objects that it needs, because the API server may refuse that while it lets the replica hold the Lease. Sends no request.
    async fn readiness(&self) -> Result<(), String> {
        match self.traffic.latest() {
            Some(outcome) => outcome.map_err(|reason| format!("the API server does not answer: {reason}"))?,
            None => return Err("the API server has not answered yet".to_owned()),
        }
        if *self.leads.borrow() && !*self.reports.performs.borrow() {
            return Err("this replica leads, but has not read the claims, classes and CSINodes; the log names the requests that fail".to_owned());
        }
        Ok(())
    }

    fn notice(&self) -> Option<String> {
        policies::notice(*self.policies.borrow())
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use service::{HealthEndpoints as _, documentation};

    use super::*;
    use crate::api::events::{Events, Reason};
    use crate::api::request::ApiRequest;

    fn endpoints(leads: bool, performs: bool) -> ControllerHealthEndpoints {
        let (events, _requests) = Events::new("node-a");
        let reports = DutyReports { performs: watch::Sender::new(performs), ..DutyReports::default() };
        reports.unready_volumes.set(3);
        reports.lost_volumes.set(2);
        ControllerHealthEndpoints {
            events: events.counter().clone(),
            traffic: ApiTraffic::default(),
            leads: watch::Sender::new(leads).subscribe(),
            reports,
            policies: watch::Sender::new(Some(false)).subscribe(),
        }
    }

    #[tokio::test]
    async fn served_metrics_are_the_documented_ones() {
        let (events, _requests) = Events::new("node-a");
        // Counters without a value are not served.
        events.publish_on_node(Reason::NodeLost, "deleted");
        let endpoints =
            ControllerHealthEndpoints { events: events.counter().clone(), ..endpoints(true, true) };
        for verb in ["list", "create"] {
            let request = ApiRequest { verb, resource: "leases".to_owned() };
            endpoints.traffic.ended(request, Ok(StatusCode::OK));
        }
        let watch = ApiRequest { verb: "watch", resource: "csinodes".to_owned() };
        endpoints.traffic.delivered(&watch);
        let mut registry = endpoints.metrics().await.unwrap();
        service::register_readiness(&mut registry, true);
        let text = documentation::page(&registry);
        documentation::assert_documented(&text, PREFIX);
        for line in
            ["leads 1", "policies_enforced 0", "volumes_on_unready_nodes 3", "volumes_on_deleted_nodes 2"]
        {
            assert!(text.contains(&format!("\nloopfs_controller_{line}\n")), "{text}");
        }
    }

    #[tokio::test]
    async fn replica_is_ready_while_api_answers() {
        let endpoints = endpoints(false, false);
        assert!(endpoints.readiness().await.unwrap_err().contains("has not answered yet"));
        endpoints.traffic.record(Ok(()));
        assert_eq!(endpoints.readiness().await, Ok(()));
        assert!(endpoints.notice().unwrap().contains("admission policies"));
        endpoints.traffic.record(Err("patch leases: 503 Service Unavailable".to_owned()));
        assert!(endpoints.readiness().await.unwrap_err().contains("patch leases: 503"));
        assert_eq!(endpoints.liveness().await, Ok(()), "a restart would not repair it");
    }
    /// Its role may lack a right, while the right to hold the Lease is there.
    #[tokio::test]
    async fn leader_is_ready_after_first_reads() {
        for performs in [false, true] {
            let endpoints = endpoints(true, performs);
            endpoints.traffic.record(Ok(()));
            assert_eq!(endpoints.readiness().await.is_ok(), performs);
        }
    }
}
