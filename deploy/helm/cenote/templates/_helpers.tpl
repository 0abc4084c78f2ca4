{{- define "cenote.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "cenote.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "cenote.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "cenote.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* What selects pods of a component: (list . "master"). Never changes between versions. */ -}}
{{- define "cenote.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "cenote.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "cenote.labels" -}}
{{- $root := index . 0 -}}
{{ include "cenote.selector" . }}
app.kubernetes.io/part-of: cenote
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{- define "cenote.podLabels" -}}
{{ include "cenote.selector" . }}
{{- with (index . 0).Values.podLabels }}
{{- range $label, $_ := . }}
{{- if regexMatch "^(app|model|llm-d\\.ai/.*|inference\\.networking\\..*|app\\.kubernetes\\.io/(name|instance|component))$" $label }}
{{- fail (printf "podLabels: %s is what an InferencePool, or this chart, selects pods by; give ours another label" $label) }}
{{- end }}
{{- end }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "cenote.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* etcd://host:2379,host:2379/prefix: for masters, daemons and clients alike. */ -}}
{{- define "cenote.etcdUrl" -}}
{{- $etcd := .Values.etcd -}}
{{- if and $etcd.internal.enabled $etcd.endpoints -}}
{{- fail "give etcd.endpoints, or etcd.internal.enabled, not both" -}}
{{- end -}}
{{- $hosts := $etcd.endpoints -}}
{{- if $etcd.internal.enabled -}}
{{- $hosts = list -}}
{{- $name := printf "%s-etcd" (include "cenote.fullname" .) -}}
{{- range $i := until (int $etcd.internal.replicas) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s.%s.svc:2379" $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- if not $hosts -}}
{{- fail "name an etcd: etcd.endpoints=[\"10.0.1.1:2379\", ...], or etcd.internal.enabled=true for a small one of this chart" -}}
{{- end -}}
etcd://{{ join "," $hosts }}/{{ $etcd.prefix }}
{{- end -}}

{{- define "cenote.etcdArgs" -}}
{{- with .Values.etcd.tls }}
{{- if .secretName }}
- --etcd-ca=/etc/cenote/etcd/ca.crt
{{- if .clientCertificate }}
- --etcd-cert=/etc/cenote/etcd/tls.crt
- --etcd-key=/etc/cenote/etcd/tls.key
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Variables of a daemon and of the command beside it: (list . "CENOTE_STORE_"). */ -}}
{{- define "cenote.env" -}}
{{- $root := index . 0 -}}
{{- $etcd := $root.Values.etcd -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: CENOTE_MASTER
  value: {{ include "cenote.etcdUrl" $root | quote }}
{{- if $etcd.tls.secretName }}
- name: CENOTE_CLIENT_ETCD_CA
  value: /etc/cenote/etcd/ca.crt
{{- if $etcd.tls.clientCertificate }}
- name: CENOTE_CLIENT_ETCD_CERT
  value: /etc/cenote/etcd/tls.crt
- name: CENOTE_CLIENT_ETCD_KEY
  value: /etc/cenote/etcd/tls.key
{{- end }}
{{- end }}
{{- if $etcd.auth.secretName }}
{{- range $prefix := list (index . 1) "CENOTE_CLIENT_" }}
- name: {{ $prefix }}ETCD_USER
  valueFrom: {secretKeyRef: {name: {{ $etcd.auth.secretName }}, key: username}}
- name: {{ $prefix }}ETCD_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $etcd.auth.secretName }}, key: password}}
{{- end }}
{{- end }}
{{- if not $root.Values.auth.insecure }}
{{- $isNode := and (eq (index . 1) "CENOTE_STORE_") (not $root.Values.store.drain.onStop) }}
- name: CENOTE_CLIENT_TOKEN_FILE  # of commands that are run in the pod: on nodes these look, and change nothing
  value: /etc/cenote/auth/{{ ternary "store" "admin" $isNode }}.token
{{- end }}
{{- end -}}

{{- /* The Secret with the pool's tokens. */ -}}
{{- define "cenote.authSecret" -}}
{{- .Values.auth.secretName | default (printf "%s-auth" (include "cenote.fullname" .)) -}}
{{- end -}}

{{- define "cenote.podIp" -}}
{{- if .Values.ipv6 }}[$(POD_IP)]{{ else }}$(POD_IP){{ end -}}
{{- end -}}

{{- define "cenote.storeUser" -}}
{{- $store := .Values.store -}}
{{- if kindIs "invalid" $store.runAsUser -}}
{{- ternary 0 65532 $store.rdma.enabled -}}
{{- else -}}
{{- int $store.runAsUser -}}
{{- end -}}
{{- end -}}
