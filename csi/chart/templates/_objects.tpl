{{/*
Objects of csi/deploy with the values that have no counterpart in its text.
*/}}

{{/*
Fails if values contradict each other. values.schema.json checks each value alone.
*/}}
{{- define "loopfs.check" -}}
{{- $values := .Values -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the name %s of the release: it is part of the names of objects; use at most 40 lower case letters, digits and -" .Release.Name) -}}
{{- end -}}
{{- $namespace := include "loopfs.namespace" . -}}
{{- if and $values.namespace.create (eq .Release.Namespace $namespace) -}}
{{- fail (printf "namespace.create: Helm cannot record the release in the namespace %s, which the chart creates; give another one with --namespace, such as kube-system, or create the namespace yourself with the label pod-security.kubernetes.io/enforce=privileged and set namespace.create to false" $namespace) -}}
{{- end -}}
{{- include "loopfs.checkDataDir" (dict "root" . "dataDir" $values.dataDir "value" "dataDir") -}}
{{- range $pool, $settings := $values.pools -}}
{{- with $settings.dataDir -}}
{{- include "loopfs.checkDataDir" (dict "root" $ "dataDir" . "value" (printf "pools.%s.dataDir" $pool)) -}}
{{- end -}}
{{- end -}}
{{- /* The kernel limits the path of a unix socket to 107 bytes. */ -}}
{{- $socket := printf "%s/plugins/%s/csi.sock" $values.kubeletDir $values.driverName -}}
{{- if gt (len $socket) 107 -}}
{{- fail (printf "kubeletDir and driverName: the path of the driver's socket, %s, has %d bytes, and the kernel allows 107; use a shorter driverName" $socket (len $socket)) -}}
{{- end -}}
{{- /* helm template takes the release of Kubernetes from --kube-version. It does not know which kinds the API server serves. */ -}}
{{- if and $values.components.claimLabels (semverCompare "<1.36.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "components.claimLabels: Kubernetes %s does not serve admissionregistration.k8s.io/v1 MutatingAdmissionPolicy; upgrade the cluster to Kubernetes 1.36 or later, or set components.claimLabels to false (helm template takes the release of Kubernetes from --kube-version)" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{/*
Fails if the parent of a data directory holds files of others, which the pods would mount from the host, or if another driver has the
data directory: with collect, each of the two removes volumes that only the other one knows.

Context: "root", "dataDir", and "value", the name of the value.
*/}}
{{- define "loopfs.checkDataDir" -}}
{{- $dataDir := .dataDir -}}
{{- $value := .value -}}
{{- $parent := dir $dataDir -}}
{{- $shared := list "/bin" "/boot" "/dev" "/etc" "/home" "/lib" "/lib64" "/opt" "/proc" "/root" "/run" "/sbin" "/sys" "/tmp" "/usr" "/var" "/var/lib" "/var/log" "/var/run" -}}
{{- if or (has $parent $shared) (hasPrefix (printf "%s/" $parent) (printf "%s/" .root.Values.kubeletDir)) -}}
{{- fail (printf "%s: the pods would mount %s of the host, the parent of %s, with the files of other programs; use a directory whose parent holds nothing else, such as /var/lib/loopfs/data" $value $parent $dataDir) -}}
{{- end -}}
{{- /* helm template reads no cluster, and finds no DaemonSet. */ -}}
{{- $release := .root.Release.Name -}}
{{- $namespace := include "loopfs.namespace" .root -}}
{{- range $daemonSet := (lookup "apps/v1" "DaemonSet" "" "").items -}}
{{- $metadata := $daemonSet.metadata -}}
{{- $other := not (or (eq $metadata.namespace $namespace) (eq (dig "annotations" "meta.helm.sh/release-name" "" $metadata) $release)) -}}
{{- if and $other (eq (dig "labels" "app.kubernetes.io/name" "" $metadata) "loopfs") -}}
{{- range $container := $daemonSet.spec.template.spec.containers -}}
{{- if has (printf "--data-dir=%s" $dataDir) ($container.args | default (list)) -}}
{{- fail (printf "%s: the DaemonSet %s/%s has the data directory %s too; two drivers cannot share a file system, so use one of its own for each" $value $metadata.namespace $metadata.name $dataDir) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Lets Helm keep an object that a later release does not have, and when it uninstalls the release. Users may have objects of their own in
the namespace, and pods with volumes need the CSIDriver. Context: the object.
*/}}
{{- define "loopfs.keep" -}}
{{- $annotations := .metadata.annotations | default (dict) -}}
{{- $_ := set .metadata "annotations" (merge (dict "helm.sh/resource-policy" "keep") $annotations) -}}
{{- end -}}

{{/*
Returns the reference of an image. Context: repository, tag and digest.
*/}}
{{- define "loopfs.image" -}}
{{- if not (or .tag .digest) -}}
{{- fail (printf "images: %s has neither a tag nor a digest; set one of them" .repository) -}}
{{- end -}}
{{- .repository -}}
{{- if .tag -}}{{- printf ":%s" .tag -}}{{- end -}}
{{- if .digest -}}{{- printf "@%s" .digest -}}{{- end -}}
{{- end -}}

{{/*
Returns the StorageClasses. Context: "root", and "base", the object of storageclass.yaml.
*/}}
{{- define "loopfs.storageClasses" -}}
{{- $base := .base -}}
{{- range $name, $class := .root.Values.storageClasses }}
{{- $object := deepCopy $base -}}
{{- $_ := set $object.metadata "name" $name -}}
{{- range $field := list "allowVolumeExpansion" "allowedTopologies" "mountOptions" "parameters" "reclaimPolicy" "volumeBindingMode" -}}
{{- if hasKey $class $field -}}
{{- $_ := set $object $field (index $class $field) -}}
{{- end -}}
{{- end -}}
{{- $annotations := deepCopy ($class.annotations | default (dict)) -}}
{{- if $class.default -}}
{{- $_ := set $annotations "storageclass.kubernetes.io/is-default-class" "true" -}}
{{- end -}}
{{- if $annotations -}}
{{- $_ := set $object.metadata "annotations" $annotations -}}
{{- end }}
---
{{ toYaml $object }}
{{- end }}
{{- end -}}

{{/*
Returns the DaemonSets: one, or one for each pool. Context: "root", and "base", the object of daemonset.yaml with the patches of the
components.
*/}}
{{- define "loopfs.daemonSets" -}}
{{- $base := .base -}}
{{- $values := .root.Values -}}
{{- range $pool, $settings := $values.pools | default (dict "" (dict)) }}
{{- $daemonSet := deepCopy $base -}}
{{- $pod := $daemonSet.spec.template.spec -}}
{{- $chosen := dict -}}
{{- range $name := list "affinity" "maxUnavailable" "priorityClassName" "tolerations" -}}
{{- if hasKey $settings $name -}}
{{- $_ := set $chosen $name (index $settings $name) -}}
{{- else -}}
{{- $_ := set $chosen $name (index $values $name) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $daemonSet.spec.updateStrategy.rollingUpdate "maxUnavailable" $chosen.maxUnavailable -}}
{{- $_ := set $pod "priorityClassName" $chosen.priorityClassName -}}
{{- $_ := set $pod "tolerations" $chosen.tolerations -}}
{{- range $labels := list $values.nodeSelector ($settings.nodeSelector | default (dict)) -}}
{{- range $key, $value := $labels -}}
{{- $_ := set $pod.nodeSelector $key $value -}}
{{- end -}}
{{- end -}}
{{- $affinity := deepCopy ($chosen.affinity | default (dict)) -}}
{{- if $pool -}}
{{- $_ := set $daemonSet.metadata "name" (printf "%s-%s" $base.metadata.name $pool) -}}
{{- range $labels := list $daemonSet.metadata.labels $daemonSet.spec.selector.matchLabels $daemonSet.spec.template.metadata.labels -}}
{{- $_ := set $labels "app.kubernetes.io/component" $pool -}}
{{- end -}}
{{- /* Two drivers of one name on a node would replace each other's sockets. The scheduler keeps the second pod Pending. */ -}}
{{- $others := dict "matchLabels" (dict "app.kubernetes.io/name" "loopfs") "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "NotIn" "values" (list $pool))) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $others -}}
{{- $apart := $affinity.podAntiAffinity | default (dict) -}}
{{- $required := $apart.requiredDuringSchedulingIgnoredDuringExecution | default (list) -}}
{{- $_ := set $apart "requiredDuringSchedulingIgnoredDuringExecution" (append $required $term) -}}
{{- $_ := set $affinity "podAntiAffinity" $apart -}}
{{- end -}}
{{- if $affinity -}}
{{- $_ := set $pod "affinity" $affinity -}}
{{- end -}}
{{- if hasKey $settings "dataDir" -}}
{{- include "loopfs.moveDataDir" (dict "pod" $pod "from" $values.dataDir "to" $settings.dataDir) -}}
{{- end -}}
{{- include "loopfs.pullSecrets" (dict "root" $.root "pod" $pod) -}}
{{- range $container := $pod.containers -}}
{{- $image := $values.images.loopfs -}}
{{- $name := $container.name -}}
{{- if eq $container.name "csi-snapshotter" -}}
{{- $image = $values.images.csiSnapshotter -}}
{{- $name = "csiSnapshotter" -}}
{{- end -}}
{{- $_ := set $container "image" (include "loopfs.image" $image) -}}
{{- $_ := set $container "imagePullPolicy" $values.images.pullPolicy -}}
{{- with get $values.options $name -}}
{{- $_ := set $container "args" (concat $container.args .) -}}
{{- end -}}
{{- if and $values.seLinuxOptions (not $container.securityContext.privileged) -}}
{{- $_ := set $container.securityContext "seLinuxOptions" $values.seLinuxOptions -}}
{{- end -}}
{{- $own := $settings.resources | default (dict) -}}
{{- if hasKey $own $name -}}
{{- $_ := set $container "resources" (index $own $name) -}}
{{- else -}}
{{- $_ := set $container "resources" (index $values.resources $name) -}}
{{- end -}}
{{- end }}
---
{{ toYaml $daemonSet }}
{{- end }}
{{- end -}}

{{/*
Returns the Deployment of the controller. Context: "root", and "base", the object of controller.yaml with the patches of the components.
*/}}
{{- define "loopfs.controller" -}}
{{- $deployment := deepCopy .base -}}
{{- $values := .root.Values -}}
{{- $settings := $values.controller -}}
{{- $pod := $deployment.spec.template.spec -}}
{{- $_ := set $deployment.spec "replicas" $settings.replicas -}}
{{- $_ := set $pod "priorityClassName" $settings.priorityClassName -}}
{{- range $key, $value := $settings.nodeSelector -}}
{{- $_ := set $pod.nodeSelector $key $value -}}
{{- end -}}
{{- if $settings.tolerations -}}
{{- $_ := set $pod "tolerations" $settings.tolerations -}}
{{- end -}}
{{- if $settings.affinity -}}
{{- $_ := set $pod "affinity" $settings.affinity -}}
{{- end -}}
{{- include "loopfs.pullSecrets" (dict "root" .root "pod" $pod) -}}
{{- range $container := $pod.containers -}}
{{- with $settings.options -}}
{{- $_ := set $container "args" (concat $container.args .) -}}
{{- end -}}
{{- $_ := set $container "image" (include "loopfs.image" $values.images.loopfs) -}}
{{- $_ := set $container "imagePullPolicy" $values.images.pullPolicy -}}
{{- $_ := set $container "resources" $settings.resources -}}
{{- end }}
---
{{ toYaml $deployment }}
{{- end -}}

{{/*
Adds the Secrets with the credentials of registries to a pod. Context: "root", and "pod", the specification of the pod.
*/}}
{{- define "loopfs.pullSecrets" -}}
{{- $secrets := list -}}
{{- range $name := .root.Values.images.pullSecrets -}}
{{- $secrets = append $secrets (dict "name" $name) -}}
{{- end -}}
{{- if $secrets -}}
{{- $_ := set .pod "imagePullSecrets" $secrets -}}
{{- end -}}
{{- end -}}

{{/*
Changes the data directory of a pod: the option of csi, and the parent directory that the pod mounts from the host.

Context: "pod", the specification of the pod, "from" and "to".
*/}}
{{- define "loopfs.moveDataDir" -}}
{{- $option := printf "--data-dir=%s" .to -}}
{{- $parent := dir .to -}}
{{- $from := .from -}}
{{- range $container := .pod.containers -}}
{{- $args := list -}}
{{- range $arg := $container.args -}}
{{- $args = append $args (eq $arg (printf "--data-dir=%s" $from) | ternary $option $arg) -}}
{{- end -}}
{{- $_ := set $container "args" $args -}}
{{- range $mount := $container.volumeMounts -}}
{{- if eq $mount.name "loopfs" -}}
{{- $_ := set $mount "mountPath" $parent -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $volume := .pod.volumes -}}
{{- if eq $volume.name "loopfs" -}}
{{- $_ := set $volume.hostPath "path" $parent -}}
{{- end -}}
{{- end -}}
{{- end -}}
